"""gymjax: fine-tune and run open-weight language models on NVIDIA GPUs, in JAX."""

import os

__version__ = "0.1.0"

# transformers is used for its tokenizers alone; without this it says at every start that torch is absent.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
