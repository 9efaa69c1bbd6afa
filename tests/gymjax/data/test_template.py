import pytest

from gymjax.data.errors import DataError
from gymjax.data.template import FACTORY_NAMES, adds_special_tokens, chat_template

TURNS = [
    {"role": "user", "content": "What is <b>gymjax</b>? é"},
    {"role": "assistant", "content": " It trains models.\n"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "generation", "thinking", "tools"])
@pytest.mark.parametrize("prompt", [False, True])
def test_text_and_ids_are_those_of_transformers(make_tokenizer, name, prompt):
    tokenizer = make_tokenizer(name, bos="<s>", eos="</s>")
    turns = TURNS[:3] if prompt else TURNS
    template, notes = chat_template(tokenizer)
    text = template.render(turns, add_generation_prompt=prompt)
    assert text == tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.apply_chat_template(turns, add_generation_prompt=prompt, return_dict=False)
    assert notes == []


def test_tools_are_written_as_transformers_writes_them(make_tokenizer):
    tokenizer = make_tokenizer("tools")
    tools = [{"name": "add", "description": "a < b & é"}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = chat_template(tokenizer)[0].render(turns, tools=tools)
    assert text == tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
    assert '"a < b & é"' in text


def test_generation_marks_are_spans_of_the_text_without_them(make_tokenizer):
    text, spans = chat_template(make_tokenizer("generation"))[0].render_marked(TURNS)
    assert [text[start:end] for start, end in spans] == [" It trains models.\n<|im_end|>", "two<|im_end|>"]


def test_globals_filters_and_loop_controls(make_tokenizer):
    source = (
        "{{ strftime_now('%Y') | length }}{% for message in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{{ {'b': '<é>', 'a': 1} | tojson }}{{ [1] | tojson(indent=1) }}{% endfor %}"
    )
    assert chat_template(make_tokenizer(source))[0].render(TURNS) == '4{"b": "<é>", "a": 1}[\n 1\n]'


def test_built_in_templates(make_tokenizer):
    plain = make_tokenizer(None)
    assert chat_template(plain, "chatml")[0].render(TURNS[2:]) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    )
    begins = make_tokenizer(None, bos="<s>", eos="</s>", adds_bos=True)
    text = chat_template(begins, "default")[0].render([{"role": "system", "content": "s"}, *TURNS[2:], TURNS[2]],
                                                      add_generation_prompt=True)  # fmt: skip
    assert text == "<s>s\n\nHuman: one\nAssistant:two</s>\nHuman: one\nAssistant:".replace(":two", ": two")


def test_template_file_and_factory_names(make_tokenizer, write):
    tokenizer = make_tokenizer("chatml")
    path = write("mine.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}\n")
    template, notes = chat_template(tokenizer, str(path))
    assert template.render(TURNS[2:]) == "onetwo"
    assert template.origin == str(path)
    for name in ("llama3", "qwen3", "mistral"):
        assert name in FACTORY_NAMES
        template, notes = chat_template(tokenizer, name)
        assert template.text == tokenizer.chat_template
        assert notes == [f"template: {name} selects the tokenizer's own chat template"]


def test_named_templates_use_the_default_one(make_tokenizer):
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "x"}
    try:
        assert chat_template(tokenizer)[0].render(TURNS) == TURNS[0]["content"]
    finally:
        tokenizer.chat_template = None


def test_own_tokens_of_a_tokenizer(make_tokenizer):
    begins = make_tokenizer(None, bos="<s>", eos="</s>", adds_bos=True)
    assert adds_special_tokens(begins) == ([begins.bos_token_id], [])
    assert adds_special_tokens(make_tokenizer(None)) == ([], [])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template, .*set template: chatml or default .*or template: path.jinja"),
        ("llama3", "the tokenizer has no chat template"),
        ("lama3", r'template: "lama3" is unknown\. Did you mean "llama3"\? Leave it out'),
        ("gone.jinja", "the file gone.jinja does not exist"),
        ("folder/gone", "the file folder/gone does not exist"),
    ],
)
def test_bad_template_key(make_tokenizer, template, message):
    with pytest.raises(DataError, match=message):
        chat_template(make_tokenizer(None), template)


def test_bad_template_that_is_no_text(make_tokenizer, tmp_path):
    (tmp_path / "x.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(DataError, match=r"template: .*x\.jinja is not UTF-8 \(invalid start byte at byte 3\)"):
        chat_template(make_tokenizer(), str(tmp_path / "x.jinja"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = 5
    with pytest.raises(DataError, match=r"chat_template must be a text, is 5; correct tokenizer_config\.json"):
        chat_template(tokenizer)


def test_bad_chatml_without_its_tokens(make_tokenizer):
    tokenizer = make_tokenizer(None, eos="</s>", added=("<s>", "</s>"))
    with pytest.raises(
        DataError, match=r"the tokenizer has no <\|im_start\|> and no <\|im_end\|>; set template: default"
    ):
        chat_template(tokenizer, "chatml")


def test_bad_default_without_eos(make_tokenizer):
    with pytest.raises(DataError, match="template: default ends answers with the EOS token, the tokenizer has none"):
        chat_template(make_tokenizer(None, eos=None), "default")


def test_bad_syntax_names_the_line(make_tokenizer):
    with pytest.raises(DataError, match=r"chat template \(the tokenizer's own\), line 2: .*correct the template"):
        chat_template(make_tokenizer("a\n{% for x %}"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system turns') }}", "refuses these messages: no system turns"),
        ("{{ messages[0].nothing.more }}", "refuses these messages: .*has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "refuses these messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses these messages: .*append"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on these messages: .*[Rr]ange"),
    ],
)
def test_bad_templates_stay_in_the_sandbox(make_tokenizer, source, message):
    with pytest.raises(DataError, match=message):
        chat_template(make_tokenizer(source))[0].render(TURNS)
