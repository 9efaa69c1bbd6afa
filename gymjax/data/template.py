"""Chat templates: which one is used, and rendering it in jinja2's sandbox.

The template is the tokenizer's own unless the `template` key says otherwise, so that the text trained on is the text
that servers send. Globals and filters are those that Hugging Face templates rely on: raise_exception, strftime_now,
tojson, the loop controls, and the {% generation %} tag around what the assistant says.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gymjax.data.errors import DataError, did_you_mean

# Unicode noncharacters: they never occur in exchanged text, and a message holding one is refused.
OPEN_MARK, CLOSE_MARK = "\ufdd0", "\ufdd1"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DEFAULT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Human: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token + '\\n' }}"
    "{% else %}{{ raise_exception('the default template has no ' + message['role'] + ' turns') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
BUILT_IN = {"chatml": CHATML, "default": DEFAULT}

NO_TEMPLATE = (
    "the tokenizer has no chat template, so conversations cannot be written as text; set template: chatml or default "
    "(built in), or template: path.jinja, or use the tokenizer of the model's instruct version"
)

# LLaMA-Factory's template names: they select the tokenizer's own template.
FACTORY_NAMES = frozenset(
    """alpaca aquila atom baichuan baichuan2 bailing belle bluelm breeze chatglm2 chatglm3 codegeex2 codegeex4 cohere
    cpm cpm3 cpm4 dbrx deepseek deepseek3 deepseekr1 deepseekcoder empty ernie ernie_nothink exaone falcon falcon_h1
    fewshot gemma gemma2 gemma3 gemma3n glm4 glm4_moe glmz1 gpt gpt_oss granite3 granite4 hunyuan index intern intern2
    llama2 llama2_zh llama3 llama4 marco mimo minicpm3 ministral mistral mistral_small mixtral moonlight nemotron olmo
    olmo2 openchat openchat-3.6 opencoder orion phi phi_small phi3 phi4 phi4_mini qwen qwen2 qwen2.5 qwen3
    qwen3_nothink sailor seed_coder seed_oss skywork_o1 smollm smollm2 smollm3 solar starchat telechat telechat2 vicuna
    xuanyuan xverse yayi yi yuan zephyr""".split()  # noqa: SIM905 - a list of quoted names would be three times as long
)


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        text: jinja source; save it beside the weights, so that servers use the template that was trained.
        origin: where it came from, for messages.
        special: names of special tokens -> their text (bos_token, eos_token, ...).
    """

    text: str
    origin: str
    special: Mapping[str, str] = field(default_factory=dict)
    compiled: jinja2.Template = field(repr=False, compare=False, kw_only=True)

    @property
    def marks_generation(self) -> bool:
        """Whether {% generation %} tags mark what the assistant says."""
        return re.search(r"\{%[-+]?\s*generation\b", self.text) is not None

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the character spans inside {% generation %} tags.

        Raises:
            DataError: the template refuses these messages or fails.
        """
        try:
            marked = self.compiled.render(
                **self.special,
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template ({self.origin}) refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise DataError(f"the chat template ({self.origin}) fails on these messages: {error}") from error
        return _split_marks(marked)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; with add_generation_prompt, up to where the assistant begins to speak."""
        return self.render_marked(messages, tools=tools, add_generation_prompt=add_generation_prompt)[0]


def chat_template(tokenizer: Any, template: str | None = None) -> tuple[ChatTemplate, list[str]]:
    """Return the chat template in force, and notes to print about the choice.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
        template: None for the tokenizer's own; a .jinja file; "chatml" or "default" (built in: Human/Assistant lines
            ended by the EOS token); or a LLaMA-Factory name, which selects the tokenizer's own.

    Raises:
        DataError: there is no such template, or it does not compile.
    """
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    notes: list[str] = []
    if template in BUILT_IN:
        text, origin = _built_in(template, tokenizer), f"built in: {template}"
    elif template is None or template in FACTORY_NAMES:
        text, origin = _own_template(tokenizer), "the tokenizer's own"
        if template is not None:
            notes.append(f"template: {template} selects the tokenizer's own chat template")
    else:
        text, origin = _template_file(template), template
    return ChatTemplate(text, origin, special, compiled=_compile(text, origin)), notes


def adds_special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts by itself before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start], dressed[start + len(bare) :]
    return [], []


def _built_in(name: str, tokenizer: Any) -> str:
    if name == "chatml":
        missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.get_vocab()]
        if missing:
            raise DataError(
                f"template: chatml needs the tokens <|im_start|> and <|im_end|>, the tokenizer has no "
                f"{' and no '.join(missing)}; set template: default, or a .jinja file with the tokenizer's own tokens"
            )
    if name == "default" and tokenizer.eos_token is None:
        raise DataError(
            "template: default ends answers with the EOS token, the tokenizer has none; set eos_token in it"
        )
    begins = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in adds_special_tokens(tokenizer)[0]
    return ("{{ bos_token }}" if begins else "") + BUILT_IN[name]


def _own_template(tokenizer: Any) -> str:
    text = tokenizer.chat_template
    if isinstance(text, Mapping):
        text = text.get("default")
    if not text:
        raise DataError(NO_TEMPLATE)
    if not isinstance(text, str):
        raise DataError(f"the tokenizer's chat_template must be a text, is {text!r:.60}; correct tokenizer_config.json")
    return text


def _template_file(template: str) -> str:
    path = Path(template).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"template: {path} is not UTF-8 ({error.reason} at byte {error.start})") from None
    if path.suffix in (".jinja", ".jinja2", ".j2") or path.name != template:
        raise DataError(f"template: the file {template} does not exist; give the path of a .jinja file")
    known = sorted({*BUILT_IN, *FACTORY_NAMES})
    raise DataError(
        f'template: "{template}" is unknown.{did_you_mean(template, known)} Leave it out for the tokenizer\'s own, '
        "or use chatml, default, or a .jinja file"
    )


class _Generation(jinja2.ext.Extension):
    """The {% generation %} tag: puts marks around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - the name and type jinja2 asks for

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{OPEN_MARK}{caller()}{CLOSE_MARK}"


def _compile(text: str, origin: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        return environment.from_string(text, globals=names)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"chat template ({origin}), line {error.lineno}: {error.message}; correct the template"
        ) from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Write JSON without HTML escapes, which jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _split_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Take the marks out of a rendered text, and return the spans that they enclosed."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length, opened = 0, 0
    for piece in re.split(f"([{OPEN_MARK}{CLOSE_MARK}])", marked):
        if piece == OPEN_MARK:
            opened = length
        elif piece == CLOSE_MARK:
            spans.append((opened, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans
