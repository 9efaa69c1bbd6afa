"""Rules that tie keys together."""

from collections.abc import Iterator

from gymjax.config.sections import Config

Problem = tuple[tuple[str, ...], str]


def problems(config: Config) -> Iterator[Problem]:
    """Yield (keys, message) for every rule that the configuration breaks."""
    if not config.model.model_name_or_path:
        yield ("model_name_or_path",), "model_name_or_path must be given: a folder, a .gguf file or a hub id"
