"""Read turns in the sharegpt and OpenAI shapes."""

import json
from collections.abc import Mapping
from typing import Any

from gymjax.data.conversation import ROLES, Conversation, Dropped, Message
from gymjax.data.errors import DataError, did_you_mean
from gymjax.data.read import Row

DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
OPENAI_ROLES = {"developer": "system", "function": "tool", "model": "assistant"}
EXTRA_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")


def from_sharegpt(turns: Any, row: Row, columns: Mapping[str, str], tags: Mapping[str, str]) -> Conversation | Dropped:
    """Read {conversations: [{from, value}], system?, tools?}.

    Turns alternate between (human or observation) and (gpt or function_call), start with the first kind and end with
    the second; a row that breaks this order is dropped and reported.

    Raises:
        DataError: a turn has a wrong type or an unknown role, or the last answer is empty.
    """
    messages = read_messages(turns, row, {**DEFAULT_TAGS, **tags})
    spoken = [turn for turn in messages if turn.role != "system"]
    system = [turn for turn in messages if turn.role == "system"]
    if len(system) > 1 or (system and messages[0] is not system[0]):
        return Dropped(row.source, "a system turn after the first")
    for index, turn in enumerate(spoken):
        if (turn.role == "assistant") != (index % 2 == 1):
            return Dropped(row.source, f"turn {index + 1} is {turn.role}: turns must alternate, starting with human")
    return _finish(tuple(messages), row, columns)


def from_openai(turns: Any, row: Row, columns: Mapping[str, str], tags: Mapping[str, str]) -> Conversation | Dropped:
    """Read {messages: [{role, content, tool_calls?, train?, weight?}], tools?}; a row without a last answer is dropped.

    Raises:
        DataError: a turn has a wrong type or an unknown role, or the last answer is empty.
    """
    return _finish(tuple(read_messages(turns, row, {**OPENAI_TAGS, **tags})), row, columns)


def from_halves(prompt: Any, completion: Any, row: Row, columns: Mapping[str, str]) -> Conversation | Dropped:
    """Read {prompt: [{role, content}], completion: [{role, content}]}: answers in the prompt are not trained.

    Raises:
        DataError: as from_openai.
    """
    asked = [Message(turn.role, turn.content, 0.0, turn.extra) for turn in read_messages(prompt, row)]
    return _finish((*asked, *read_messages(completion, row)), row, columns)


def read_tools(row: Row, column: str) -> tuple[Mapping[str, Any], ...] | None:
    """Return a row's tool descriptions: a list of objects, or the same as JSON text; None where there are none."""
    tools = row.fields.get(column)
    if isinstance(tools, str) and tools.strip():
        tools = _parse_json(tools, f"{row.source}: column {column}")
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{row.source}: column {column} must be a list of tool descriptions, found {tools!r:.80}")
    return tuple(tools)


def read_messages(turns: Any, row: Row, tags: Mapping[str, str] = OPENAI_TAGS) -> list[Message]:
    """Return the turns of a list, in order.

    Raises:
        DataError: no list of turns, or a turn has a wrong type or an unknown role; names file and line.
    """
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else f"{type(turns).__name__} {turns!r:.60}"
        raise DataError(f"{row.source}: the turns must be a list of objects, found {found}")
    return [_message(turn, f"{row.source}: turn {number}", tags) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, where: str, tags: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise DataError(
            f"{where} must be an object with {tags['role_tag']} and {tags['content_tag']}, found {turn!r:.80}"
        )
    role = _role(turn, where, tags)
    extra = {name: turn[name] for name in EXTRA_FIELDS if turn.get(name) is not None}
    if extra.get("tool_calls"):
        extra["tool_calls"] = [_tool_call(call, where) for call in _list(extra["tool_calls"], f"{where}: tool_calls")]
    content = turn.get(tags["content_tag"])
    if role == "function_call":
        calls = _parse_json(_content(content, where, tags), f"{where}: {tags['function_tag']}")
        extra["tool_calls"] = [_tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
        role, content = "assistant", ""
    if content is None and extra.get("tool_calls"):
        content = ""
    return Message(role, _content(content, where, tags), _weight(turn, role, where), extra)


def _role(turn: Mapping[str, Any], where: str, tags: Mapping[str, str]) -> str:
    roles = {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["observation_tag"]: "tool",
        tags["function_tag"]: "function_call",
        tags["system_tag"]: "system",
    }
    if tags["role_tag"] == "role":
        roles = {**OPENAI_ROLES, **{role: role for role in ROLES}, **roles}
    name = turn.get(tags["role_tag"])
    if not isinstance(name, str) or name not in roles:
        raise DataError(
            f'{where} has unknown {tags["role_tag"]} "{name}".{did_you_mean(str(name), roles)} '
            f"Known: {', '.join(roles)}; rename it or set its tag in dataset_info.json"
        )
    return roles[name]


def _content(content: Any, where: str, tags: Mapping[str, str]) -> str:
    if isinstance(content, list):
        return "\n".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: {tags['content_tag']} must be text, found {type(content).__name__} {content!r:.60}")
    return content


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise DataError(f"{where}: content part of type {kind} is not supported, only text; remove the part or the row")


def _weight(turn: Mapping[str, Any], role: str, where: str) -> float:
    """Return the loss weight: 1 for assistant turns, else 0, unless the turn's `train` or `weight` says otherwise."""
    train, weight = turn.get("train"), turn.get("weight")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{where}: train must be true or false, found {train!r}")
    if weight is not None and (
        isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e6
    ):
        raise DataError(f"{where}: weight must be a number of at least 0, found {weight!r}")
    wanted = 0.0 if train is False else float(weight) if weight is not None else 1.0
    if role == "assistant":
        return wanted
    if wanted > 0 and (train or weight is not None):
        raise DataError(f"{where}: only assistant turns are trained, this one is {role}; remove train/weight, "
                        "or set train_on_prompt: true to train every token")  # fmt: skip
    return 0.0


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return {"type": "function", "function": {...}} with arguments as an object, as templates expect them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call needs a name and arguments, found {call!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, f"{where}: arguments of {function['name']}")
    name = {"id": call["id"]} if call.get("id") is not None else {}
    return {**name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where} must be a list, found {type(value).__name__}")
    return value


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON at column {error.colno} ({error.msg}); found {text!r:.80}") from error


def _finish(messages: tuple[Message, ...], row: Row, columns: Mapping[str, str]) -> Conversation | Dropped:
    """Put the row's system text in front, and check that an answer that can be trained ends the conversation."""
    last = messages[-1]
    if last.role != "assistant":
        return Dropped(row.source, f"the last turn is {last.role}, nothing answers it")
    if not last.content.strip() and not last.extra.get("tool_calls"):
        raise DataError(f"{row.source}: the last assistant turn is empty; drop the row or give it text")
    system = row.fields.get(columns.get("system", "system"))
    if system is not None and not isinstance(system, str):
        raise DataError(f"{row.source}: column system must be text, found {type(system).__name__}")
    if system and messages[0].role != "system":
        messages = (Message("system", system), *messages)
    if not any(turn.weight > 0 for turn in messages):
        return Dropped(row.source, "no turn is trained (train: false or weight: 0 on each)")
    return Conversation(messages, row.source, read_tools(row, columns.get("tools", "tools")))
