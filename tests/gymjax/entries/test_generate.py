import json

import pytest

from gymjax import generate as entry
from gymjax.config import ConfigError
from gymjax.data.errors import DataError
from gymjax.inference.questions import read_questions


@pytest.fixture(scope="module")
def loaded(make_config):
    return entry.load_adapted(make_config())


def test_prompt_is_asked_through_the_template_or_continued_raw(base, capsys, loaded, make_config):
    entry.main([f"model_name_or_path={base}", "do_sample=false", "max_new_tokens=12", "prompt=Who are you?"])
    printed = capsys.readouterr().out
    asked = entry.answer_prompts(loaded, [[{"role": "user", "content": "Who are you?"}]], make_config())[0]
    assert printed == asked.text + "\n"
    raw = entry.answer_prompts(loaded, ["Who are you?"], make_config(), raw=True)[0]
    assert raw.prompt_tokens == len("Who are you?") < asked.prompt_tokens


def test_file_of_prompts_becomes_predictions(base, rows_file, tmp_path, capsys):
    out = tmp_path / "out"
    entry.main([f"model_name_or_path={base}", "max_new_tokens=4", f"prompt_file={rows_file}", f"output_dir={out}"])
    rows = [json.loads(line) for line in (out / "generated_predictions.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["I am a tiny model.", "2.", "Hello!"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Who are you?"}]
    assert all(isinstance(row["predict"], str) for row in rows)
    assert [path.name for path in out.iterdir()] == ["generated_predictions.jsonl"]
    assert "wrote 3 answers" in capsys.readouterr().out


def test_an_interrupt_leaves_the_answers_there_are(base, rows_file, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = [f"model_name_or_path={base}", "max_new_tokens=4", f"prompt_file={rows_file}", f"output_dir={out}"]
    answer = entry.answer_prompts

    def interrupted(*args, on_batch, **kwargs):
        def keep(batch):
            on_batch(batch)
            raise KeyboardInterrupt

        return answer(*args, on_batch=keep, **kwargs)

    monkeypatch.setattr(entry, "answer_prompts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        entry.main([*arguments, "per_device_eval_batch_size=2"])
    monkeypatch.undo()
    kept = [json.loads(line) for line in (out / entry.PARTIAL).read_text().splitlines()]
    assert [path.name for path in out.iterdir()] == [entry.PARTIAL]
    assert f"2 of 3 answers are in {out / entry.PARTIAL}" in capsys.readouterr().err
    entry.main(arguments)
    whole = [json.loads(line) for line in (out / entry.PREDICTIONS).read_text().splitlines()]
    assert [path.name for path in out.iterdir()] == [entry.PREDICTIONS]
    assert [row for row in whole if row in kept] == kept


def test_adapter_changes_the_answer_and_an_unused_one_is_noted(adapter, loaded, make_config, capsys):
    prompt = [[{"role": "user", "content": "Who are you?"}]]
    base_text = entry.answer_prompts(loaded, prompt, make_config())[0].text
    config = make_config(adapter_name_or_path=str(adapter))
    assert entry.answer_prompts(entry.load_adapted(config), prompt, config)[0].text != base_text
    entry.load_adapted(make_config(output_dir=str(adapter)))
    assert f"adapter_name_or_path={adapter} uses the adapter trained there" in capsys.readouterr().err


def test_packed_base_answers(make_config):
    config = make_config(quantization_bit=4)
    assert len(entry.answer_prompts(entry.load_adapted(config), ["Hi"], config)[0].token_ids) == 12


def test_default_answer_length_fits_a_small_model(loaded, make_config):
    config = make_config(max_new_tokens=None)
    assert config.generate.max_new_tokens == 1024
    assert entry.fitting(config.generate, config, loaded).max_new_tokens == 128
    explicit = make_config(max_new_tokens=1024)
    with pytest.raises(ValueError, match="exceeds the model's 256 positions"):
        entry.answer_prompts(loaded, ["Hi"], explicit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], 'give either prompt="..." or prompt_file=FILE'),
        (["prompt=a", "prompt_file=b"], 'give either prompt="..." or prompt_file=FILE'),
        (["prompt=a", "raw=maybe"], "raw must be true or false, is maybe"),
        (["prompt="], "prompt is empty; write prompt=value"),
        (["prompt=a"], "model_name_or_path must be given"),
    ],
)
def test_bad_use_is_named(arguments, message):
    with pytest.raises(ConfigError) as error:
        entry.main(arguments)
    assert message in str(error.value)


def test_a_prompt_that_cannot_be_answered_is_named_by_its_line(base, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n" + 300 * "x" + "\n")
    with pytest.raises(
        ValueError, match=r"prompts\.txt:3: 3\d\d tokens \+ max_new_tokens 8 = 3\d\d exceeds the model's"
    ):
        entry.main([f"model_name_or_path={base}", f"prompt_file={path}", f"output_dir={tmp_path}", "max_new_tokens=8"])
    bad = tmp_path / "bad.jinja"
    bad.write_text("{{ raise_exception('no') }}")
    arguments = [f"model_name_or_path={base}", f"prompt_file={path}", f"output_dir={tmp_path}", f"template={bad}"]
    with pytest.raises(ValueError, match=r"prompts\.txt:1: the chat template .* refuses these messages: no"):
        entry.main(arguments)


def test_answers_are_not_made_for_a_folder_that_cannot_be_written(base, tmp_path, rows_file):
    (tmp_path / "file").write_text("")
    for folder, message in (("file", "file is a file; give a folder"), ("file/out", "file/out cannot be written")):
        with pytest.raises(ConfigError, match=message):
            entry.main([f"model_name_or_path={base}", f"prompt_file={rows_file}", f"output_dir={tmp_path / folder}"])


def test_rows_of_every_shape_are_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "a"}]
    rows = [
        {"prompt": "p", "label": "l"},
        {"prompt": turns, "completion": "c"},
        {"messages": [*turns, {"role": "assistant", "content": "b"}]},
        {"instruction": "i", "input": "j", "output": "o"},
        {"text": "t"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(path)
    assert [question.prompt for question in questions] == ["p", turns, turns, "i\nj", "t"]
    assert [question.label for question in questions] == ["l", "c", "b", "o", ""]
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert [question.prompt for question in read_questions(tmp_path / "lines.txt")] == ["one", "two"]


def test_what_comes_before_a_question_is_asked_as_it_is_trained(tmp_path):
    path = tmp_path / "prompts.jsonl"
    user, system = {"role": "user", "content": "i\nj"}, {"role": "system", "content": "s"}
    before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"instruction": "i", "input": "j", "system": "s", "history": [["q", "a"]], "output": "o"},
        {"instruction": "i", "input": "j", "system": None, "history": []},
        {"prompt": "i\nj", "system": "s"},
        {"messages": [user], "system": "s", "tools": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "i"}, {"type": "text", "text": "j"}]}]},
        {"prompt": [user], "completion": [{"role": "assistant", "content": "c"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(path)
    wanted = [[system, *before, user], "i\nj", [system, user], [system, user], [user], [user]]
    assert [question.prompt for question in questions] == wanted
    assert questions[-1].label == "c"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "prompts.jsonl:1: no prompt among the columns question"),
        ({"prompt": ""}, "prompts.jsonl:1: the prompt is empty"),
        ({"prompt": 3}, "prompts.jsonl:1: prompt must be a text or a list of turns, found 3"),
        ({"text": 3}, "prompts.jsonl:1: column text must be text, found int 3"),
        ({"prompt": "q", "tools": [{"name": "f"}]}, "prompts.jsonl:1: column tools describes tools, which prompts are"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "prompts.jsonl:1: turn 1: content must be text, found None",
        ),
        ({"messages": [{"content": "q"}]}, 'prompts.jsonl:1: turn 1 has unknown role "None"'),
        ({"messages": []}, "prompts.jsonl:1: the turns must be a list of objects, found an empty list"),
        ({"instruction": "i", "history": ["q"]}, "prompts.jsonl:1: history must be a list of [question, answer] text"),
    ],
)
def test_bad_prompt_rows_are_named(tmp_path, row, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError) as error:
        read_questions(path)
    assert message in str(error.value)
