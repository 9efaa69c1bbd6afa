import json
import types

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CORPUS = ["What is gymjax? It trains models. user assistant system tool Hello world, how are you? answer one two"] * 4

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
        "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # BOS in the template, header tokens, content trimmed, no white space after the end of a turn.
    "llama3": (
        "{{- bos_token }}\n{%- for message in messages %}\n{{- '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
    ),
    # Ends turns with EOS, has no generation prompt, refuses turns that do not alternate.
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # As Qwen3: an empty thought before the last answer, thoughts dropped from the earlier ones.
    "thinking": (
        "{% for message in messages %}{% set content = message['content'] %}{% if message['role'] == 'assistant' %}"
        "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% else %}{% set thought = '' %}{% endif %}"
        "{% if loop.last %}{% set content = '<think>\n' + thought + '\n</think>\n\n' + content %}{% endif %}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "tools": (
        "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
        "{% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
        "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% endif %}"
    ),
}
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>", "<think>", "</think>"]  # fmt: skip


def byte_level(*, adds_bos, trim_offsets, added):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    post = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        post.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", added.index("<s>"))]))
    tokenizer.post_processor = processors.Sequence(post)
    return tokenizer


def metaspace(added):
    """As SentencePiece does: a space is a character of the next word, unknown characters become bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", *added, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Byte pieces are ordinary vocabulary: only the first ones are added tokens.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory):
    """make_tokenizer(template, kind="bytes", ...) -> a fast tokenizer that went through a folder on disk."""
    made = {}

    def make(template=None, *, kind="bytes", bos=None, eos="<|im_end|>", pad=None, adds_bos=False, added=tuple(ADDED)):
        key = (template, kind, bos, eos, pad, adds_bos, added)
        if key not in made:
            if kind == "metaspace":
                backend = metaspace(list(added))
            else:
                backend = byte_level(adds_bos=adds_bos, trim_offsets=kind == "trimmed", added=list(added))
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token=pad)
            tokenizer.chat_template = TEMPLATES.get(template, template)
            folder = tmp_path_factory.mktemp("tokenizer")
            tokenizer.save_pretrained(folder)
            made[key] = AutoTokenizer.from_pretrained(folder)
        return made[key]

    return make


@pytest.fixture
def settings():
    """settings(**changes) -> an object with the attributes of the config's data section."""

    def make(dataset, **changes):
        values = {
            "dataset": dataset and str(dataset),
            "dataset_dir": "data",
            "eval_dataset": None,
            "template": None,
            "default_system": None,
            "cutoff_len": 256,
            "max_samples": None,
            "val_size": 0.0,
            "train_on_prompt": False,
            "mask_history": False,
            "packing": None,
            "mix_strategy": "concat",
            "interleave_probs": None,
            "overwrite_cache": False,
        }
        return types.SimpleNamespace(**(values | changes))

    return make


@pytest.fixture
def write(tmp_path):
    """write(name, rows) -> path of a file in the test's folder; rows are text, or objects for json and jsonl."""

    def make(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(rows, str):
            path.write_text(rows, encoding="utf-8")
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return path

    return make


@pytest.fixture
def chat():
    """chat("q1", "a1", ...) -> a row of messages, user and assistant in turns."""

    def make(*texts, system=None):
        roles = ("user", "assistant")
        turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
        return {"messages": ([{"role": "system", "content": system}] if system else []) + turns}

    return make
