"""The one exception of this package."""

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Something in the data, its description or its chat template must change; the message says where and how."""


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """Return ` Did you mean "x"?` for the known name closest to the wanted one, or an empty string."""
    close = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return f' Did you mean "{close[0]}"?' if close else ""
