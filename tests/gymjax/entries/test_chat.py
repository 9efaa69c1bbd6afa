import pytest

from gymjax import chat
from gymjax.generate import answer_prompts, load_adapted


@pytest.fixture(scope="module")
def loaded(make_config):
    return load_adapted(make_config())


def test_each_answer_sees_the_conversation_before_it(loaded, make_config):
    shown = []
    messages = chat.converse(loaded, make_config(), ["Hello", "", "And you?", "/exit", "never"], shown.append)
    assert [turn["role"] for turn in messages] == ["user", "assistant", "user", "assistant"]
    for end in (1, 3):
        assert messages[end]["content"] == answer_prompts(loaded, [messages[:end]], make_config())[0].text
    assert "".join(shown) == "".join(f"{messages[end]['content']}\n" for end in (1, 3))


def test_commands(loaded, make_config):
    shown = []
    messages = chat.converse(loaded, make_config(), ["Hello", "/clear", "/foo bar", "Hi"], shown.append)
    assert [turn["content"] for turn in messages[:1]] == ["Hi"]
    assert len(messages) == 2
    assert any("unknown command /foo" in piece for piece in shown)


def test_a_line_that_does_not_fit_is_taken_back(loaded, make_config):
    shown = []
    messages = chat.converse(loaded, make_config(), ["Hello", "x" * 300], shown.append)
    assert len(messages) == 2
    assert "(not answered: prompt 1 of" in shown[-1]
    assert "/clear starts anew" in shown[-1]


def test_piped_lines(monkeypatch):
    lines = iter(["one", "two"])

    def fake_input(prompt):
        assert prompt == ""
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", fake_input)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert list(chat.typed_lines("> ")) == ["one", "two"]
