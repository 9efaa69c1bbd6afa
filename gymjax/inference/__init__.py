"""Text generation: prefill, a static key-value cache, and the whole token loop in one compiled program."""

from gymjax.inference.generate import Answer, generate, stream

__all__ = ["Answer", "generate", "stream"]
