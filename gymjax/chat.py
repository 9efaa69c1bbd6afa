"""`python -m gymjax.chat CONFIG.yaml`: a conversation with a model, streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from gymjax.checkpoint.load import LoadedModel
from gymjax.config import Config, load
from gymjax.generate import fitting, load_adapted
from gymjax.inference import stream
from gymjax.inference.prompts import Messages
from gymjax.training.command import keys_text, run_process, split_arguments
from gymjax.training.setup import ATTENTION

HINT = "/clear forgets the conversation, /exit or end of input leaves"


def reply(loaded: LoadedModel, messages: Messages, config: Config, *, seed: int) -> Iterator[str]:
    """Streams the answer to a conversation as a config says.

    Args:
        loaded: from `load_adapted`.
        messages: the whole conversation so far, a user's turn last.
        config: sampling, template, default_system and attention are read.
        seed: randomness of this answer.
    """
    return stream(
        loaded.model,
        loaded.tokenizer,
        messages,
        fitting(config.generate, config, loaded),
        seed=seed,
        template=config.data.template,
        default_system=config.data.default_system,
        generation_eos=loaded.generation_config.get("eos_token_id"),
        attention=ATTENTION[config.model.flash_attn],
    )


def converse(
    loaded: LoadedModel, config: Config, lines: Iterable[str], show: Callable[[str], None]
) -> list[dict[str, str]]:
    """Answers line after line; each answer sees the whole conversation before it.

    A line that cannot be answered (the conversation has outgrown the model's positions, the template refuses it) is
    taken back with the reason shown, and the conversation goes on.

    Args:
        loaded: from `load_adapted`.
        config: as in `reply`; the n-th answer is drawn with seed + n.
        lines: what the user types, commands included.
        show: writes a piece of text.

    Returns:
        The conversation at its end.
    """
    messages: list[dict[str, str]] = []
    for number, line in enumerate(lines):
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/clear":
            messages = []
            show("(cleared)\n")
        elif text.startswith("/"):
            show(f"(unknown command {text.split()[0]}; {HINT})\n")
        elif text:
            messages = _turn(loaded, config, messages, text, show, config.train.seed + number)
    return messages


def _turn(loaded, config, messages, text, show, seed) -> list[dict[str, str]]:
    asked = [*messages, {"role": "user", "content": text}]
    pieces = []
    try:
        for piece in reply(loaded, asked, config, seed=seed):
            pieces.append(piece)
            show(piece)
    except ValueError as error:
        show(f"(not answered: {error}; /clear starts anew)\n")
        return messages
    show("\n")
    return [*asked, {"role": "assistant", "content": "".join(pieces)}]


def typed_lines(prompt: str) -> Iterator[str]:
    """Lines from the keyboard, with editing and history where the terminal has them, or from a pipe."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - importing it gives input() line editing; some builds of Python lack it
    else:
        prompt = ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return


def usage() -> str:
    """Text of --help."""
    return f"""
usage: python -m gymjax.chat [CONFIG.yaml] [key=value ...]

Talks with a model; {HINT}. Keys:
{keys_text(("model", "generate"))}
 data: template, default_system, cutoff_len (with rope_scaling)   train: seed, bf16, fp16
"""


def main(arguments: Sequence[str]) -> None:
    """Loads a model and converses until the input ends."""
    config = load(*split_arguments(arguments))
    loaded = load_adapted(config)
    print(f"{config.model.model_name_or_path} is ready; {HINT}")
    converse(loaded, config, typed_lines("> "), lambda piece: print(piece, end="", flush=True))


if __name__ == "__main__":
    run_process(main, usage)
