"""Turn a row into a conversation or raw text: which format a file has, and the formats without turns of their own."""

from collections.abc import Mapping
from typing import Any

from gymjax.data.conversation import Conversation, Dropped, Message, RawText
from gymjax.data.errors import DataError
from gymjax.data.read import Row
from gymjax.data.sources import Source
from gymjax.data.turns import from_halves, from_openai, from_sharegpt, read_tools

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
DEFAULT_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
    "prompt_completion": {},
}
SHARED_COLUMNS = {"system": "system", "tools": "tools"}
TURN_COLUMNS = ("messages", "conversations")
SHAPES = (
    "{instruction, input, output}, {conversations: [{from, value}]}, {messages: [{role, content}]}, "
    "{prompt, completion} or {text}"
)


def detect(fields: Mapping[str, Any], source: str, *, stage: str = "sft") -> str:
    """Return the format of a row: "alpaca", "sharegpt", "openai", "prompt_completion" or "text".

    Raises:
        DataError: the columns fit no format or several, or hold preference pairs or media.
    """
    check_supported(fields, source)
    if stage == "pt" and isinstance(fields.get("text"), str):
        return "text"
    found = []
    if "instruction" in fields and "output" in fields:
        found.append("alpaca")
    if "prompt" in fields and "completion" in fields:
        found.append("prompt_completion")
    found += [_turn_shape(fields, column, source) for column in TURN_COLUMNS if column in fields]
    if "text" in fields:
        found.append("text")
    if len(found) == 1:
        return found[0]
    columns = ", ".join(fields)
    if not found:
        raise DataError(
            f"{source}: columns ({columns}) fit no known format; use {SHAPES}, "
            "or map them in dataset_info.json (columns)"
        )
    raise DataError(
        f"{source}: columns ({columns}) fit several formats ({', '.join(found)}); keep the columns of one, "
        "or say which in dataset_info.json (formatting, columns)"
    )


def check_supported(fields: Mapping[str, Any], source: str) -> None:
    """Raise where a row holds preference pairs or media, which are not trained yet."""
    if any(fields.get(column) is not None for column in ("chosen", "rejected", "kto_tag")):
        raise DataError(
            f"{source}: chosen/rejected/kto_tag columns are preference data for stage dpo or kto, not supported yet; "
            "for stage sft give prompt and completion (the chosen answer)"
        )
    for column in MEDIA:
        if fields.get(column):
            raise DataError(
                f"{source}: column {column} holds media; only text is supported, remove the column or the row"
            )


def convert(row: Row, source: Source, *, formatting: str) -> Conversation | RawText | Dropped:
    """Turn one row into what is trained.

    Args:
        row: fields and place.
        source: its columns and tags, from dataset_info.json.
        formatting: one of detect's results.

    Raises:
        DataError: a field is missing, empty or of a wrong type, or a role is unknown; names file and line.
    """
    check_supported(_media_columns(row, source), row.source)
    if formatting == "text":
        return _from_text(row, source.columns.get("prompt", "text"))
    columns = {**DEFAULT_COLUMNS[formatting], **SHARED_COLUMNS, **source.columns}
    if formatting == "prompt_completion":
        return _from_prompt_completion(row, columns)
    if formatting == "alpaca":
        return _from_alpaca(row, columns)
    column = columns["messages"]
    if "messages" not in source.columns and column not in row.fields:
        column = next((name for name in TURN_COLUMNS if name in row.fields), column)
    if column not in row.fields:
        raise DataError(
            f"{row.source}: column {column} is missing, the row has {', '.join(row.fields) or 'none'}; give all rows "
            "of a file the same columns, or map them in dataset_info.json (columns)"
        )
    read = from_sharegpt if formatting == "sharegpt" else from_openai
    return read(row.fields.get(column), row, columns, source.tags)


def formatting_of(source: Source, first: Row, *, stage: str = "sft") -> str:
    """Return the format of a source's rows: what dataset_info.json says, else what the first row's columns say."""
    if stage == "pt" and source.formatting in (None, "alpaca") and "prompt" in source.columns:
        return "text"
    if source.formatting is not None:
        return source.formatting
    if "messages" in source.columns:
        return _turn_shape(first.fields, source.columns["messages"], first.source)
    if {"prompt", "response"} & source.columns.keys():
        return "alpaca"
    return detect(first.fields, first.source, stage=stage)


def text_field(row: Row, column: str, *, required: bool = True) -> str:
    """Return a text column; where not required, a missing or null one is empty."""
    value = row.fields.get(column)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        found = f"{type(value).__name__} {value!r:.60}" if column in row.fields else "no such column"
        raise DataError(f"{row.source}: column {column} must be text, found {found}; fix the row or map the column")
    return value


def _media_columns(row: Row, source: Source) -> dict[str, Any]:
    renamed = {name: row.fields.get(source.columns[name]) for name in source.columns if name in MEDIA}
    preference = ("chosen", "rejected", "kto_tag")
    renamed |= {name: row.fields.get(source.columns[name]) for name in source.columns if name in preference}
    return {**row.fields, **renamed}


def _turn_shape(fields: Mapping[str, Any], column: str, source: str) -> str:
    turns = fields.get(column)
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        if "role" in turns[0]:
            return "openai"
        if "from" in turns[0]:
            return "sharegpt"
        raise DataError(
            f"{source}: turns of column {column} have keys {', '.join(turns[0])}; use role and content, "
            "or from and value, or name them in dataset_info.json (tags)"
        )
    raise DataError(
        f'{source}: column {column} must be a list of turns such as [{{"role": "user", "content": "..."}}], '
        f"found {type(turns).__name__}{' (empty)' if turns == [] else ''}"
    )


def _from_text(row: Row, column: str) -> RawText | Dropped:
    text = text_field(row, column)
    if not text.strip():
        return Dropped(row.source, "the text is empty")
    return RawText(((text, 1.0),), row.source)


def _from_alpaca(row: Row, columns: Mapping[str, str]) -> Conversation:
    prompt = text_field(row, columns["prompt"])
    query = text_field(row, columns["query"], required=False)
    answer = text_field(row, columns["response"])
    system = text_field(row, columns["system"], required=False)
    question = "\n".join(part for part in (prompt, query) if part)
    if not question:
        raise DataError(
            f"{row.source}: {columns['prompt']} and {columns['query']} are both empty; drop the row or fill one"
        )
    if not answer.strip():
        raise DataError(
            f"{row.source}: {columns['response']}, the last assistant turn, is empty; drop the row or give it text"
        )
    messages = [Message("system", system)] if system else []
    for user, assistant in read_history(row, columns["history"]):
        messages += [Message("user", user), Message("assistant", assistant, 1.0)]
    messages += [Message("user", question), Message("assistant", answer, 1.0)]
    return Conversation(tuple(messages), row.source, read_tools(row, columns["tools"]))


def read_history(row: Row, column: str) -> list[tuple[str, str]]:
    """Return the [question, answer] pairs of a column; none where it is missing or null.

    Raises:
        DataError: it holds something else.
    """
    history = row.fields.get(column)
    if history is None or history == "":
        return []
    pairs = history if isinstance(history, list) else [None]
    for pair in pairs:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise DataError(
                f"{row.source}: {column} must be a list of [question, answer] text pairs, found {pair or history!r:.80}"
            )
    return [(user, assistant) for user, assistant in pairs]


def _from_prompt_completion(row: Row, columns: Mapping[str, str]) -> Conversation | RawText | Dropped:
    prompt, completion = row.fields.get("prompt"), row.fields.get("completion")
    if isinstance(row.fields.get("label"), bool):
        raise DataError(
            f"{row.source}: prompt, completion and label are preference data for stage kto, not supported yet; "
            "remove the column label and the bad answers for stage sft"
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        return from_halves(prompt, completion, row, columns)
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        raise DataError(
            f"{row.source}: prompt and completion must both be text or both be lists of messages, "
            f"found {type(prompt).__name__} and {type(completion).__name__}"
        )
    if not completion.strip():
        raise DataError(f"{row.source}: the completion is empty; drop the row or give it text")
    return RawText(((prompt, 0.0), (completion, 1.0)), row.source)
