"""Show what is trained: the tokens of one example, decoded one by one."""

from typing import Any

from gymjax.data.errors import DataError
from gymjax.data.loader import Dataset


def preview(dataset: Dataset, index: int, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the text of each token of an example, and whether it is trained as a target.

    Args:
        dataset: tokenized examples.
        index: 0-based example.
        tokenizer: the one that made the dataset.

    Raises:
        DataError: there is no such example.
    """
    if not 0 <= index < len(dataset):
        raise DataError(f"row {index} does not exist; the dataset has rows 0 to {len(dataset) - 1}")
    example = dataset[index]
    trained = [position > 0 and bool(weight > 0) for position, weight in enumerate(example.weights)]
    return [(tokenizer.decode([token]), on) for token, on in zip(example.ids.tolist(), trained)]
