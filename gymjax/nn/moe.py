"""Mixture of experts: a router, gated feed-forward experts over sorted tokens, and an expert that all tokens share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gymjax.nn.linear import Linear
from gymjax.nn.mlp import GatedMLP
from gymjax.nn.ops import layer_ops
from gymjax.nn.routing import (
    ROUTING_NAME,
    Dispatch,
    RouterStats,
    combine,
    dispatch,
    route,
    router_logits,
    router_stats,
    scatter,
    weights_of_rows,
)
from pallas_kernels.grouped_matmul import GroupedLayer, grouped_layers, grouped_mlp
from pallas_kernels.lora_linear import LOW_NAME

ExpertLayout = Literal["experts", "block_sparse_moe", "fused"]
"""How a family's files name the experts, see models/names.py."""


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """`g * sigmoid(alpha * g) * (u + 1)` with g clamped above and u on both sides at limit (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        """Computed in f32, returned in gate's dtype."""
        g = jnp.minimum(gate.astype(jnp.float32), self.limit)
        u = jnp.clip(up.astype(jnp.float32), -self.limit, self.limit)
        return (g * jax.nn.sigmoid(self.alpha * g) * (u + 1)).astype(gate.dtype)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Experts of a layer.

    Attributes:
        experts: how many, E.
        top_k: how many of them each token goes to.
        ffn_width: of one expert.
        renormalize: whether the chosen experts' weights are divided by their sum.
        use_bias: of the router and of the experts.
        activation: of the experts, where it is not SwiGLU.
        shared_ffn_width: of an expert that every token goes to through a sigmoid gate of its own; None: there is none.
        layout: how files name and cut the experts' weights.
    """

    experts: int
    top_k: int
    ffn_width: int
    renormalize: bool
    use_bias: bool = False
    activation: ClampedSwiGLU | None = None
    shared_ffn_width: int | None = None
    layout: ExpertLayout = "experts"

    @property
    def gated_in_products(self) -> bool:
        """Whether the experts' products gate what they make, so that the product of gate and up is never kept."""
        return self.activation is None and not self.use_bias


class ExpertAdapter(Protocol):
    """What may fill an expert projection's slot."""

    def grouped_layer(self, w: Any) -> GroupedLayer:
        """The projection with its base's weights, dense or packed."""
        ...

    def effective(self, w: Any) -> Array:
        """The dense weights that the product amounts to."""
        ...


class ExpertLinear(nnx.Module):
    """One projection of all experts: `y[m] = x[m] @ w[e].T + b[e]` for the rows of expert e.

    `w` is (E, out, in), dense or packed; `leading` axes (stacked layers) come before it, as in Linear.
    """

    def __init__(
        self,
        experts: int,
        in_width: int,
        out_width: int,
        *,
        use_bias: bool,
        dtype: jnp.dtype,
        leading: tuple[int, ...] = (),
    ):
        self.w = nnx.Param(jnp.zeros((*leading, experts, out_width, in_width), dtype))
        self.b = nnx.Param(jnp.zeros((*leading, experts, out_width), dtype)) if use_bias else None
        self.adapter: ExpertAdapter | None = nnx.data(None)

    def layer(self) -> GroupedLayer:
        """The projection without its bias."""
        w = self.w.get_value()
        return GroupedLayer(w) if self.adapter is None else self.adapter.grouped_layer(w)


def apply_experts(
    x: Float[Array, "rows I"],
    projections: Sequence[ExpertLinear],
    to: Dispatch,
    scale: Float[Array, "rows 1"] | float = 1.0,
) -> list[Float[Array, "rows O"]]:
    """Several projections of one input, in x.dtype, its rows sorted by expert; a bias is multiplied by `scale`."""
    ys = grouped_layers(x, [projection.layer() for projection in projections], to.sizes)
    biases = [projection.b for projection in projections]
    return [
        y if b is None else y + (scale * b.get_value()[to.expert]).astype(y.dtype)
        for y, b in zip(ys, biases, strict=True)
    ]


class MoE(nnx.Module):
    """`sum_e weight_e * down_e(activation(gate_e(x), up_e(x)))` over a token's chosen experts; no token is dropped.

    A token's weights multiply the activations before the last product, which is linear, so that the gradient of the
    weights needs no output of an expert. For the backward pass the block keeps its input, gate, up and adapters' low
    products, never the sorted copies of its input nor the experts' outputs.
    Source: arXiv 2101.03961, section 2.1; dropless: 2211.15841; what is kept: 2512.14080.
    """

    def __init__(self, width: int, cfg: MoEConfig, *, dtype: jnp.dtype, leading: tuple[int, ...] = ()):
        shared: dict[str, Any] = {"dtype": dtype, "leading": leading}
        experts: dict[str, Any] = {"use_bias": cfg.use_bias, **shared}
        self.cfg = cfg
        self.router = Linear(width, cfg.experts, use_bias=cfg.use_bias, **shared)
        self.gate = ExpertLinear(cfg.experts, width, cfg.ffn_width, **experts)
        self.up = ExpertLinear(cfg.experts, width, cfg.ffn_width, **experts)
        self.down = ExpertLinear(cfg.experts, cfg.ffn_width, width, **experts)
        ffn = cfg.shared_ffn_width
        self.shared = None if ffn is None else GatedMLP(width, ffn, use_bias=False, **shared)
        self.shared_gate = None if ffn is None else Linear(width, 1, use_bias=False, **shared)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        key: jax.Array | None = None,
        *,
        counted_BT: Bool[Array, "B T"] | None = None,
        fused_ops: bool = True,
    ) -> tuple[Float[Array, "B T D"], RouterStats | None]:
        """Applies the block.

        Args:
            x_BTD: tokens.
            key: feeds the adapters of the router and the shared expert.
            counted_BT: tokens that count in the statistics; None: none are made.
            fused_ops: of the shared expert, as in `layer_ops`.
        """
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        # Named for all who read them: the product would be made again for readers of what has no name.
        logits_ME = checkpoint_name(self._logits(x_MD, keys[0]), ROUTING_NAME)
        expert_Mk, weight_Mk = route(logits_ME, self.cfg.top_k, renormalize=self.cfg.renormalize)
        y_BTD = self._experts(x_MD, expert_Mk, weight_Mk).reshape(x_BTD.shape)
        if self.shared is not None and self.shared_gate is not None:
            open_BT1 = jax.nn.sigmoid(self.shared_gate(x_BTD, keys[1]).astype(jnp.float32))
            y_BTD = y_BTD + (open_BT1 * self.shared(x_BTD, keys[2], fused_ops=fused_ops)).astype(y_BTD.dtype)
        stats = None if counted_BT is None else router_stats(logits_ME, expert_Mk, counted_BT.reshape(-1))
        return y_BTD, stats

    def _logits(self, x_MD: Float[Array, "M D"], key: jax.Array | None) -> Float[Array, "M E"]:
        if x_MD.dtype == jnp.bfloat16 and self.router.adapter is None:
            return self.router.with_bias(router_logits(x_MD, self.router.w.get_value()))
        with jax.default_matmul_precision("highest"):  # in TF32 near ties would change experts
            return self.router(x_MD.astype(jnp.float32), key)

    def _experts(
        self, x_MD: Float[Array, "M D"], expert_Mk: Int[Array, "M k"], weight_Mk: Float[Array, "M k"]
    ) -> Float[Array, "M D"]:
        to = jax.tree.map(lambda index: checkpoint_name(index, ROUTING_NAME), dispatch(expert_Mk, self.cfg.experts))

        def experts(x_MD: Array, weight_Mk: Array) -> Array:
            rows = checkpoint_name(scatter(x_MD, to), "rows")
            if self.cfg.gated_in_products:
                gate, up, down = (projection.layer() for projection in (self.gate, self.up, self.down))
                return combine(grouped_mlp(rows, gate, up, down, weights_of_rows(weight_Mk, to), to.sizes), to)
            gate, up = apply_experts(rows, (self.gate, self.up), to)
            gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
            # Plain jnp in f32: compilers make one pass of it with the weights, and one of all its gradients.
            activation = self.cfg.activation or layer_ops(fused_ops=False).swiglu
            weight = weights_of_rows(weight_Mk, to)[:, None]
            hidden = (activation(gate.astype(jnp.float32), up.astype(jnp.float32)) * weight).astype(x_MD.dtype)
            hidden = checkpoint_name(hidden, "hidden")
            return combine(apply_experts(hidden, (self.down,), to, weight)[0], to)

        kept = jax.checkpoint_policies.save_only_these_names("gate", "up", LOW_NAME)
        # Layers are scanned: what the backward pass computes again is in another loop, so that nothing is shared with
        # the forward pass; where it computes the whole layer again, rows and unpacked weights are shared with that.
        return jax.checkpoint(experts, policy=kept, prevent_cse=False)(x_MD, weight_Mk)
