"""What a row becomes before it is tokenized: a conversation, raw text, or a counted drop."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: one of ROLES.
        content: the text; empty where an assistant turn holds only tool calls.
        weight: loss weight of the turn's tokens; 0 = not trained. Only assistant turns may be above 0.
        extra: other fields the chat template may read (tool_calls, tool_call_id, name, reasoning_content).
    """

    role: str
    content: str
    weight: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the turn as chat templates read it."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class Conversation:
    """Turns of one row, in order; `tools` are JSON schemas for the chat template."""

    messages: tuple[Message, ...]
    source: str
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class RawText:
    """Text trained without a chat template: (piece, loss weight) pairs, joined as they are, then the EOS token."""

    pieces: tuple[tuple[str, float], ...]
    source: str

    @property
    def text(self) -> str:
        """The pieces joined."""
        return "".join(piece for piece, _ in self.pieces)


@dataclass(frozen=True)
class Dropped:
    """A row left out, where it is and why; the report lists every one."""

    source: str
    reason: str
