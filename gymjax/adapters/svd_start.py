"""First factors of an adapter from the base's own weights: PiSSA (arXiv 2404.02948) and LoftQ (arXiv 2310.08659).

Both move a low-rank part of a weight into the adapter and leave the base with what remains, so that base and adapter
together still give the weight: `w = base + s b a` (PiSSA), or nearly, where the base is quantized.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from gymjax.adapters.lora import LoraSpec
from gymjax.adapters.tensors import MAGNITUDE, A, B
from pallas_kernels.nf4_linear import NF4Weight, dense

Pack = Callable[[np.ndarray], np.ndarray | NF4Weight]
EXACT = -1
_OVERSAMPLING = 8  # further directions that the fast SVD follows and drops (arXiv 0909.4061, section 4.3)
_LOFTQ_ITERATIONS = 8  # subspace iterations inside LoftQ: what quantizing leaves is as good as noise, its spectrum flat


@dataclasses.dataclass(frozen=True)
class SvdStart:
    """How the first factors are made.

    Attributes:
        method: "pissa" takes the principal directions out of the base; "loftq" what quantizing the base loses.
        iterations: pissa: subspace iterations of the fast SVD, EXACT for the exact one. loftq: alternations.
        seed: randomness of the fast SVD; the same seed and base give the same factors.
    """

    method: Literal["pissa", "loftq"]
    iterations: int
    seed: int

    def describe(self) -> str:
        """One line that two runs share if they start from the same factors, given the same base."""
        return f"{self.method}, {self.iterations} iterations, seed {self.seed}"


def split_weight(
    start: SvdStart, spec: LoraSpec, factors: MutableMapping[str, np.ndarray], name: str, w: Any, pack: Pack
) -> np.ndarray | NF4Weight:
    """The base that a module keeps; its first factors are added to `factors`.

    Args:
        start: how.
        spec: ranks and factors of the modules.
        factors: receives "<name>.lora_A.weight" (R, I) and "<name>.lora_B.weight" (O, R), f32.
        name: of the module; one that is no target keeps its whole weight.
        w: (O, I), any float dtype.
        pack: stores a weight as the base does: rounds it to the base's dtype, or quantizes it.

    Returns:
        What `pack` made of the rest.

    Raises:
        ValueError: a weight that is quantized already, a rank beyond its width, LoftQ where nothing is quantized.
    """
    rank = spec.rank_of(name)
    if not rank:
        return pack(w)
    if isinstance(w, NF4Weight):
        raise ValueError(
            f"{name} is quantized already, but {start.method} starts from 16-bit weights: give the original model as "
            "model_name_or_path; quantization_bit: 4 quantizes it while it is read"
        )
    if rank > min(w.shape):
        raise ValueError(f"lora_rank: {rank} of {name} is more than {start.method} can fill; its weight is {w.shape}")
    rng = np.random.default_rng([start.seed, zlib.crc32(name.encode())])
    w_OI = np.asarray(w, np.float32)
    split = _pissa if start.method == "pissa" else _loftq
    a_RI, b_OR, base = split(w_OI, rank, spec.factor_of(name), start.iterations, rng, pack)
    if start.method == "loftq" and not isinstance(base, NF4Weight):
        raise ValueError(f"loftq_init: {name} is not quantized, so there is no loss to start from; see lora_target")
    factors[f"{name}.{A}"], factors[f"{name}.{B}"] = a_RI, b_OR
    return base


def _pissa(w_OI, rank: int, factor: float, iterations: int, rng: np.random.Generator, pack: Pack):
    """`s b a` = the principal part of w, base = pack(w - s b a); arXiv 2404.02948, eq. 2 to 4 (QPiSSA: section 4)."""
    a_RI, b_OR = principal_factors(w_OI, rank, factor, iterations=iterations, rng=rng)
    return a_RI, b_OR, pack(w_OI - factor * (b_OR @ a_RI))


def _loftq(w_OI, rank: int, factor: float, alternations: int, rng: np.random.Generator, pack: Pack):
    """Alternates base = pack(w - s b a) with `s b a` = principal part of (w - base); arXiv 2310.08659, algorithm 1."""

    def lost(base: np.ndarray | NF4Weight):
        lost_OI = w_OI - np.asarray(dense(base, jnp.float32))
        return principal_factors(lost_OI, rank, factor, iterations=_LOFTQ_ITERATIONS, rng=rng)

    base = pack(w_OI)
    a_RI, b_OR = lost(base)
    for _ in range(alternations - 1):
        base = pack(w_OI - factor * (b_OR @ a_RI))
        a_RI, b_OR = lost(base)
    return a_RI, b_OR, base


def principal_factors(
    w: Float[np.ndarray, "O I"], rank: int, factor: float, *, iterations: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, "R I"], Float[np.ndarray, "O R"]]:
    """(a, b) with `factor * b @ a` the nearest matrix of that rank to w: singular values are shared in equal parts.

    The fast form iterates a random subspace (arXiv 0909.4061, algorithms 4.4 and 5.1).

    Args:
        w: f32.
        rank: R.
        factor: s, above 0.
        iterations: of the subspace; EXACT decomposes the whole matrix.
        rng: first subspace.
    """
    if iterations == EXACT:
        u_OR, s_R, v_RI = np.linalg.svd(w, full_matrices=False)
    else:
        width = min(rank + _OVERSAMPLING, *w.shape)
        q_OW = np.linalg.qr(w @ rng.standard_normal((w.shape[1], width), np.float32)).Q
        for _ in range(iterations):
            q_OW = np.linalg.qr(w @ np.linalg.qr(w.T @ q_OW).Q).Q
        u_WR, s_R, v_RI = np.linalg.svd(q_OW.T @ w, full_matrices=False)
        u_OR = q_OW @ u_WR
    root_R = np.sqrt(s_R[:rank] / np.float32(factor))
    return root_R[:, None] * v_RI[:rank], u_OR[:, :rank] * root_R


def as_plain_lora(
    spec: LoraSpec, tensors: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]
) -> tuple[LoraSpec, dict[str, np.ndarray]]:
    """The same function over the untouched base, as an adapter of twice the rank.

    `base + s b a = w + s [b, -b0] [a; a0]`; arXiv 2404.02948, appendix C. Alphas grow so that s stays.

    Args:
        spec: of the adapter.
        tensors: its arrays, see `adapter_tensors`.
        start: the factors that the base gave up.

    Returns:
        (spec, arrays) of the new adapter; magnitudes are kept.
    """
    growth = math.sqrt(2) if spec.use_rslora else 2
    doubled = dataclasses.replace(
        spec,
        rank=2 * spec.rank,
        alpha=growth * spec.alpha,
        rank_pattern={key: 2 * rank for key, rank in spec.rank_pattern.items()},
        alpha_pattern={key: growth * alpha for key, alpha in spec.alpha_pattern.items()},
    )
    result = {name: value for name, value in tensors.items() if name.endswith(MAGNITUDE)}
    for name in tensors.keys() - result.keys():
        sign, axis = (1, 0) if name.endswith(A) else (-1, 1)
        result[name] = np.concatenate([tensors[name], sign * start[name]], axis=axis)
    return doubled, result
