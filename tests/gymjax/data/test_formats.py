import json
import re

import pytest

from gymjax.data.conversation import Conversation, Dropped, RawText
from gymjax.data.errors import DataError
from gymjax.data.formats import convert, detect, formatting_of
from gymjax.data.read import Row
from gymjax.data.sources import Source

PLAIN = Source("d", ())


def read(fields, source=PLAIN, *, stage="sft"):
    row = Row(fields, "d.jsonl:7")
    return convert(row, source, formatting=formatting_of(source, row, stage=stage))


def turns(fields, source=PLAIN):
    found = read(fields, source)
    assert isinstance(found, Conversation)
    return [(turn.role, turn.content, turn.weight) for turn in found.messages]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def test_alpaca():
    row = {"instruction": "Add", "input": "1 and 2", "output": "3", "system": "Be brief", "history": [["hi", "hello"]]}
    assert turns(row) == [
        ("system", "Be brief", 0), ("user", "hi", 0), ("assistant", "hello", 1),
        ("user", "Add\n1 and 2", 0), ("assistant", "3", 1),
    ]  # fmt: skip
    assert turns({"instruction": "Add", "output": "3"}) == [("user", "Add", 0), ("assistant", "3", 1)]
    bare = {"instruction": "Add", "input": None, "output": "3", "system": "", "history": None}
    assert turns(bare) == [("user", "Add", 0), ("assistant", "3", 1)]


def test_alpaca_with_named_columns():
    source = Source("d", (), columns={"prompt": "q", "response": "a"})
    assert turns({"q": "x", "a": "y"}, source) == [("user", "x", 0), ("assistant", "y", 1)]


def test_sharegpt():
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}
    assert turns(row) == [("system", "s", 0), ("user", "q", 0), ("assistant", "a", 1)]
    first = {"conversations": [{"from": "system", "value": "s"}, *row["conversations"]]}
    assert turns(first) == turns(row)


def test_sharegpt_with_tags_and_tools():
    source = Source(
        "d", (), "sharegpt", {"messages": "talk"},
        {"role_tag": "who", "content_tag": "said", "user_tag": "me", "assistant_tag": "bot"},
    )  # fmt: skip
    call = {"name": "add", "arguments": {"a": 1}}
    row = {
        "talk": [
            {"who": "me", "said": "q"},
            {"who": "function_call", "said": json.dumps(call)},
            {"who": "observation", "said": "2"},
            {"who": "bot", "said": "a"},
        ],
        "tools": json.dumps([{"name": "add"}]),
    }
    found = read(row, source)
    assert [(turn.role, turn.content) for turn in found.messages] == [
        ("user", "q"), ("assistant", ""), ("tool", "2"), ("assistant", "a"),
    ]  # fmt: skip
    assert found.messages[1].extra["tool_calls"] == [{"type": "function", "function": call}]
    assert found.tools == ({"name": "add"},)


def test_sharegpt_order_is_kept_or_dropped():
    def drop(*roles):
        found = read({"conversations": [{"from": role, "value": "x"} for role in roles]})
        assert isinstance(found, Dropped)
        assert found.source == "d.jsonl:7"
        return found.reason

    assert "turn 1 is assistant: turns must alternate" in drop("gpt", "human")
    assert "turn 2 is user: turns must alternate" in drop("human", "human", "gpt")
    assert "the last turn is user" in drop("human", "gpt", "human")
    assert "a system turn after the first" in drop("human", "system", "gpt")


def test_openai_messages():
    row = {"messages": [{"role": "developer", "content": "s"}, user("q"), assistant("a")]}
    assert turns(row) == [("system", "s", 0), ("user", "q", 0), ("assistant", "a", 1)]
    parts = {"messages": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), assistant("a")]}
    assert turns(parts)[0] == ("user", "one\ntwo", 0)
    assert turns({"conversations": row["messages"]}) == turns(row)


def test_openai_tool_calls_are_passed_on_with_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply = {"role": "tool", "content": "2", "tool_call_id": "1", "name": None}
    row = {"messages": [user("q"), assistant(None, tool_calls=[call]), reply, assistant("a")]}
    found = read(row)
    wanted = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found.messages[1].extra == {"tool_calls": [wanted]}
    assert found.messages[1].content == ""
    assert found.messages[2].fields() == {"role": "tool", "content": "2", "tool_call_id": "1"}


def test_train_and_weight_flags():
    question = {**user("q"), "train": False, "weight": 0}
    answers = assistant("a", train=False), assistant("b", weight=0.5), assistant("c", train=True, weight=None)
    row = {"messages": [user("q"), answers[0], user("q"), answers[1], question, answers[2]]}
    assert [weight for role, _, weight in turns(row) if role == "assistant"] == [0, 0.5, 1]
    row = {"messages": [user("q"), assistant("a", weight=0)]}
    assert read(row) == Dropped("d.jsonl:7", "no turn is trained (train: false or weight: 0 on each)")


def test_text():
    assert read({"text": "x"}) == RawText((("x", 1.0),), "d.jsonl:7")
    assert read({"text": " \n"}) == Dropped("d.jsonl:7", "the text is empty")
    named = Source("d", (), columns={"prompt": "body"})
    assert read({"body": "x"}, named, stage="pt").text == "x"
    assert read({"text": "x", "messages": []}, stage="pt").text == "x"


def test_prompt_completion():
    assert read({"prompt": "1+1=", "completion": "2"}) == RawText((("1+1=", 0.0), ("2", 1.0)), "d.jsonl:7")
    row = {"prompt": [user("q"), assistant("a"), user("q2")], "completion": [assistant("b")]}
    assert turns(row) == [("user", "q", 0), ("assistant", "a", 0), ("user", "q2", 0), ("assistant", "b", 1)]


def test_prompt_completion_with_system():
    row = {"prompt": [{"role": "system", "content": "s"}, user("q")], "completion": [assistant("b")], "system": "s2"}
    assert turns(row)[0] == ("system", "s", 0)
    assert [role for role, _, _ in turns(row)] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"instruction": "x", "output": "y", "text": "z"}, r"fit several formats \(alpaca, text\); keep the"),
        ({"question": "x", "answer": "y"}, r"columns \(question, answer\) fit no known format; use \{instruction"),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, "preference data for stage dpo or kto, not supported yet"),
        ({"prompt": "x", "completion": "a", "label": True}, "preference data for stage kto, not supported yet"),
        ({"instruction": "x", "output": "y", "images": ["a.png"]}, "column images holds media; only text is supported"),
        ({"messages": "hi"}, "column messages must be a list of turns .* found str"),
        ({"messages": []}, r"found list \(empty\)"),
        ({"messages": [{"speaker": "x", "text": "y"}]}, "turns of column messages have keys speaker, text; use role"),
        ({"instruction": "x", "output": " "}, "output, the last assistant turn, is empty; drop the row or"),
        ({"instruction": "", "output": "x"}, "instruction and input are both empty"),
        ({"instruction": 3, "output": "x"}, "column instruction must be text, found int 3"),
        ({"instruction": "x", "output": None}, "column output must be text, found NoneType"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, r"history must be a list of \[question, answer\]"),
        ({"instruction": "x", "output": "y", "history": "a"}, "history must be a list"),
        ({"prompt": "x", "completion": [assistant("y")]}, "both be text or both be lists .* found str and list"),
        ({"prompt": "x", "completion": ""}, "the completion is empty"),
        ({"prompt": [user("x")], "completion": [assistant("")]}, "the last assistant turn is empty"),
        ({"text": 5}, "column text must be text, found int 5"),
        ({"messages": [user("q"), assistant("")]}, "the last assistant turn is empty; drop the row or give it text"),
        ({"messages": [user("q"), {"role": "bot", "content": "a"}]}, 'unknown role "bot"'),
        ({"messages": [user("q"), "a"]}, "turn 2 must be an object with role and content, found 'a'"),
        ({"messages": [user("q"), assistant(None)]}, "turn 2: content must be text, found NoneType"),
        ({"messages": [user([{"type": "image_url"}]), assistant("a")]}, "part of type image_url is not supported"),
        ({"messages": [user("q"), assistant("a", train="no")]}, "train must be true or false, found 'no'"),
        ({"messages": [user("q"), assistant("a", weight=-1)]}, "weight must be a number of at least 0, found -1"),
        ({"messages": [{**user("q"), "train": True}, assistant("a")]}, "only assistant turns are trained, this one is"),
        ({"messages": [user("q"), assistant("a")], "system": 4}, "column system must be text, found int"),
        ({"messages": [user("q"), assistant("a")], "tools": "{"}, "column tools is not JSON at column 2"),
        ({"messages": [user("q"), assistant("a")], "tools": [3]}, "column tools must be a list of tool descriptions"),
        ({"messages": [user("q"), assistant("", tool_calls=[{}])]}, "a tool call needs a name and arguments"),
        ({"messages": [user("q"), assistant("", tool_calls={"a": 1})]}, "tool_calls must be a list, found dict"),
        ({"conversations": [{"from": "humann", "value": "x"}]}, r'unknown from "humann"\. Did you mean "human"\?'),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "add(1)"}]},
         "function_call is not JSON"),
    ],
)  # fmt: skip
def test_bad_row_names_file_and_line(fields, message):
    with pytest.raises(DataError, match=r"^d\.jsonl:7: .*" + message) as caught:
        read(fields)
    assert re.match(r"d\.jsonl:7:", str(caught.value))


def test_bad_row_of_another_shape_than_the_first():
    with pytest.raises(DataError, match=r"d\.jsonl:9: column messages is missing, the row has instruction, output"):
        convert(Row({"instruction": "a", "output": "b"}, "d.jsonl:9"), PLAIN, formatting="openai")


def test_bad_formatting_for_the_columns():
    with pytest.raises(DataError, match=r'd\.jsonl:7: turn 1 has unknown from "None"\. Known: human, gpt'):
        read({"messages": [user("x")]}, Source("d", (), "sharegpt"))
    with pytest.raises(DataError, match=r"column output must be text, found no such column; .*map the column"):
        read({"instruction": "x"}, Source("d", (), "alpaca"))
    pictures = Source("d", (), columns={"prompt": "instruction", "images": "pic"})
    with pytest.raises(DataError, match="column images holds media; only text is supported"):
        read({"instruction": "x", "output": "y", "pic": ["a.png"]}, pictures)


def test_detect_names_the_format():
    assert detect({"instruction": "", "output": ""}, "s") == "alpaca"
    assert detect({"prompt": "", "completion": ""}, "s") == "prompt_completion"
    assert detect({"text": ""}, "s") == "text"
    assert detect({"conversations": [{"from": "", "value": ""}], "id": 1}, "s") == "sharegpt"
    assert detect({"messages": [{"role": "", "content": ""}]}, "s") == "openai"
