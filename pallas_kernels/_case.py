"""A named shape of an operation, shared by tests and the bench, and what it is measured against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Case:
    """One shape of one operation.

    Attributes:
        name: carries the shape, such as "B4-S4096-N32-K8-D128-causal".
        args: random key -> (positional arguments, keyword arguments) of the public function.
        flops: floating-point operations of the forward pass.
        bytes: bytes that the forward pass must read and write.
        flops_fwd_bwd: floating-point operations of forward and backward together.
        bytes_fwd_bwd: bytes that forward and backward together must read and write.
        wrt: positions of the arguments that the backward pass differentiates; none for a function without gradient.
        function: of the operation's folder that is called; None for the one of its name.
        metric: "tflops" or "gbps"; None for the operation's own.
        parts: metric -> (position of an argument, operations of its gradient alone), where that is timed too.
        short: whether a call takes the device less than it may take the host, so that the GPU's own clock is asked, as
            for what is measured in bytes.
    """

    name: str
    args: Callable[[jax.Array], tuple[tuple[Any, ...], dict[str, Any]]]
    flops: float
    bytes: float
    flops_fwd_bwd: float
    bytes_fwd_bwd: float
    wrt: tuple[int, ...]
    function: str | None = None
    metric: str | None = None
    parts: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    short: bool = False


@dataclass(frozen=True)
class Peer:
    """Other code that computes the same, timed in the same run.

    Attributes:
        call: takes what `prepare` returns, and the case's keyword arguments.
        prepare: positional arguments -> positional arguments, done once and not timed.
    """

    call: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] = lambda *args: args
