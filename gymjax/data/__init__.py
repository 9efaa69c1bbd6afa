"""Data: files of conversations or text to tokenized, masked, packed or padded batches.

`prepare` makes the datasets of a run, `Loader` their batches by step number, `preview` shows what is trained.
"""

from gymjax.data.chat import Encoder, Example
from gymjax.data.errors import DataError
from gymjax.data.loader import Batch, Dataset, Loader
from gymjax.data.pack import buckets
from gymjax.data.prepare import Prepared, prepare
from gymjax.data.preview import preview
from gymjax.data.report import DataReport, SplitReport
from gymjax.data.template import ChatTemplate, chat_template

__all__ = [
    "Batch",
    "ChatTemplate",
    "DataError",
    "DataReport",
    "Dataset",
    "Encoder",
    "Example",
    "Loader",
    "Prepared",
    "SplitReport",
    "buckets",
    "chat_template",
    "prepare",
    "preview",
]
