"""What a step keeps for its backward pass: chosen by what fits, shown, and refused where it does not, uncompiled."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from gymjax.config.sections import KEPT_NAMES
from gymjax.models.decoder_config import LayerKind
from gymjax.models.remat import kept_names
from gymjax.nn.mlp import CHUNK
from gymjax.optim.labels import labels
from gymjax.training.memory import Memory, kept_bytes, predict
from gymjax.training.metrics import GIB, peak_flops
from gymjax.training.moments import ffn_elements, layer_bytes
from gymjax.training.step import StepSettings
from gymjax.training.workload import Workload, attention_name, device_bytes

FILL = 0.92  # of the device's memory that "auto" fills: predictions are good to 5 %, and evaluation needs a little
FLOPS_A_BYTE = 200  # of products, in the time in which an H200's memory gives a byte
REACHED = 0.55  # of the datasheet's rate, by the matrix products and attention of a step on an H200

NF4_BITS = 4.127  # a weight, block scales included


@dataclasses.dataclass(frozen=True)
class Plan:
    """A rematerialisation and what it costs.

    Attributes:
        work: what is planned.
        remat: see Decoder.trunk.
        memory: predicted.
        limit: bytes that the device has; None where it does not say.
        why: how remat was chosen; empty where it was given.
    """

    work: Workload
    remat: str
    memory: Memory
    limit: int | None
    why: str = ""

    @property
    def settings(self) -> StepSettings:
        """Of the step, with what it keeps."""
        return dataclasses.replace(self.work.settings, remat=self.remat)

    @property
    def fits(self) -> bool:
        """Whether device and host have what is needed."""
        device = self.limit is None or self.memory.peak <= self.limit
        return device and (not self.memory.offloaded or self.memory.offloaded <= host_bytes())


def choose(work: Workload, wanted: str, limit: int | None) -> Plan:
    """The plan for a rematerialisation, or for "auto" the one that computes least again in FILL of the device's memory.

    "auto" looks at "none", and at every set of what `units` lists; where not even "full" fits, "offload" is left. Where
    the device tells no limit it is "full".

    Args:
        work: the step.
        wanted: "auto" or any of Decoder.trunk's.
        limit: bytes that the device has; None where it does not say.
    """
    if wanted != "auto":
        return Plan(work, wanted, predict(work, wanted), limit)
    full = predict(work, "full")
    if limit is None:
        return Plan(work, "full", full, limit, "auto: this device tells no limit to fill")
    sets = {remat: memory for remat, memory in _candidates(work, full) if memory.peak <= FILL * limit}
    if not sets:
        why = f"auto: full would need {full.peak / GIB:.2f} GiB"
        return Plan(work, "offload", predict(work, "offload"), limit, why)
    best = min(sets, key=lambda remat: (recompute_seconds(work, remat), sets[remat].peak))
    return Plan(work, best, sets[best], limit, f"auto: computes least again in {FILL:.0%} of the device's memory")


def _candidates(work: Workload, full: Memory) -> Iterator[tuple[str, Memory]]:
    """Every remat that "auto" looks at, with its memory; sizes of names add up, so each unit is measured once."""
    yield "full", full
    yield "none", predict(work, "none")
    base = kept_bytes(work, "full")
    sizes = {unit: kept_bytes(work, ",".join(unit)) - base for unit in units(work)}
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(sizes, count):
            remat = ",".join(name for unit in chosen for name in unit)
            kept = full.kept + sum(sizes[unit] for unit in chosen)
            layer = full.layer - layer_bytes(work, "full") + layer_bytes(work, remat)
            yield remat, dataclasses.replace(full, kept=kept, layer=layer)


def units(work: Workload) -> list[tuple[str, ...]]:
    """Names that are worth keeping, those together of which one alone saves nothing.

    Attention's output only where its kernel can go on from it; q and k as products where they are normalised, and the
    residual stream's middle not where attention's output is, as a norm's backward pass needs the product itself; gate
    and up not where long rows go through in chunks, which are computed again in any case.
    """
    cfg, found = work.cfg, []
    if attention_name(work) == "mosaic_gpu":
        found.append(("attention", "attention_lse"))
    if cfg.qk_norm == "none":
        found.append(("q", "k", "v"))
    elif not cfg.fused:
        found.append(("q_product", "k_product", "v"))
    if cfg.norms == "pre":
        found.append(("middle",))
    if cfg.sparse_layers or cfg.fused:
        found.append(("gate", "up"))
    elif work.length <= CHUNK:
        found += [("gate",), ("up",)]
    if cfg.sparse_layers:
        found.append(("rows",))
    if any(kind.experts is not None and not kind.experts.gated_in_products for kind in cfg.kinds):
        found.append(("hidden",))
    return found


def recompute_seconds(work: Workload, remat: str) -> float:
    """Time of a step that goes into computing again what the forward pass did not keep.

    Products, attention, and of experts what is gathered and gated. At REACHED of the device's rate, where that is
    unknown at that of an H200: what counts is the order.
    """
    if remat == "none":
        return 0.0
    kept = kept_names(remat)
    spared = {name for unit in units(work) if set(unit) <= kept for name in unit}
    costs = itertools.chain.from_iterable(_products(work, kind).items() for kind in work.cfg.kinds)
    flops = sum(cost for name, cost in costs if name not in spared)
    return flops * work.tokens * work.accumulation / (REACHED * (peak_flops() or 989e12))


def _products(work: Workload, kind: LayerKind) -> dict[str, float]:
    """FLOPs a token of what a layer's backward pass computes again, by the name that would spare it."""
    cfg = work.cfg
    q, k, ffn = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim, ffn_elements(cfg, kind)
    seen = min(work.length / 2, kind.window or work.length)
    of_q, of_k = ("q", "k") if cfg.qk_norm == "none" else ("q_product", "k_product")
    of_experts = {}
    if kind.experts is not None:
        rows = kind.experts.top_k * cfg.width
        of_experts = {"rows": FLOPS_A_BYTE * 4.0 * rows}  # read and written
        if not kind.experts.gated_in_products:
            of_experts["hidden"] = FLOPS_A_BYTE * 2.0 * ffn  # written
    return of_experts | {
        of_q: 2.0 * cfg.width * q,
        of_k: 2.0 * cfg.width * k,
        "v": 2.0 * cfg.width * k,
        "attention": 4.0 * q * seen,
        "middle": 2.0 * cfg.width * q,
        "gate": 2.0 * cfg.width * ffn,
        "up": 2.0 * cfg.width * ffn,
    }


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_if_too_large(plan: Plan) -> None:
    """Stops a run that cannot fit, before anything is compiled.

    Raises:
        ValueError: naming what is needed, what there is, and what to change, the least costly first.
    """
    if not plan.fits:
        raise ValueError(refusal(plan))


def refusal(plan: Plan) -> str:
    """Why a plan cannot run, and what to change."""
    memory, limit = plan.memory, plan.limit
    if limit is not None and memory.peak > limit:
        needs = f"{memory.peak / GIB:.2f} GiB of a device that has {limit / GIB:.2f}"
    else:
        needs = f"{memory.offloaded / GIB:.2f} GiB of a host that has {host_bytes() / GIB:.2f} for layer inputs"
    what = f"gradient_checkpointing: {plan.remat} with {plan.work.rows} x {plan.work.length} tokens a device"
    return f"{what} needs {needs}. In this order: {'; '.join(remedies(plan))}"


def remedies(plan: Plan) -> list[str]:
    """What to change where a plan does not fit, each with the peak that it leads to."""
    work, found = plan.work, []
    if plan.remat not in ("full", "offload"):
        found.append(f"gradient_checkpointing: full {_needs(work, 'full')}")
    if plan.remat != "offload":
        found.append(f"gradient_checkpointing: offload {_needs(work, 'offload')}")
    if work.rows > 1:
        smaller = _halved(work, "rows", plan.limit)
        smaller = dataclasses.replace(smaller, accumulation=work.accumulation * (work.rows // smaller.rows))
        keys = f"per_device_train_batch_size: {smaller.rows} with gradient_accumulation_steps: {smaller.accumulation}"
        found.append(f"{keys} {_needs(smaller, 'offload')} with offload")
    adapted = any(label.startswith("lora") for label in jax.tree.leaves(labels(work.state.params)))
    leaves = jax.tree.leaves(work.frozen.get("stacks", {})) if adapted else []
    dense = [leaf for leaf in leaves if leaf.ndim > 2 and jnp.issubdtype(leaf.dtype, jnp.floating)]
    if dense:
        spared = device_bytes(dense) - sum(leaf.size for leaf in dense) * NF4_BITS / 8 / work.fsdp
        found.append(f"quantization_bit: 4 ({spared / GIB:.1f} GiB less of frozen weights)")
    elif plan.memory.optimizer > plan.memory.trained:
        found.append("optim: adamw_8bit, or finetuning_type: lora")
    if work.length > 2:
        shorter = _halved(work, "length", plan.limit)
        found.append(f"cutoff_len: {shorter.length} {_needs(shorter, 'offload')} with offload")
    found.append(
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment, as JAX takes 0.75 of a GPU's memory by default"
    )
    return found


def _halved(work: Workload, field: str, limit: int | None) -> Workload:
    """With rows or length halved until it fits with "offload", at least once and down to 1."""
    while getattr(work, field) > 1:
        work = dataclasses.replace(work, **{field: getattr(work, field) // 2})
        if limit is None or predict(work, "offload").peak <= limit:
            break
    return work


def _needs(work: Workload, remat: str) -> str:
    return f"({predict(work, remat).peak / GIB:.2f} GiB)"


def describe(plan: Plan) -> list[str]:
    """Lines for the user: what lies where, the predicted peak against what there is, what is computed again."""
    work, memory = plan.work, plan.memory
    names = ", ".join(name for name in KEPT_NAMES if name in kept_names(plan.remat))
    kept = "all activations" if plan.remat == "none" else names
    rows = [
        ("frozen weights", memory.frozen),
        ("trained weights, f32", memory.trained),
        ("optimizer state", memory.optimizer),
        ("gradients", memory.gradients),
        ("batch", memory.batch),
        ("layer inputs", memory.inputs - memory.offloaded),
        (f"kept: {kept}" if kept else "kept beside them", memory.kept),
        ("loss of a chunk of tokens", memory.loss),
        ("backward pass of a layer", memory.layer),
        ("the optimizer's update", memory.update),
    ]
    lines = [f"plan: {work.rows} x {work.length} tokens a device, gradient_checkpointing {plan.remat}"]
    lines[0] += f" ({plan.why})" if plan.why else ""
    lines += [f"  {name:<28} {size / GIB:8.3f} GiB" for name, size in rows if size]
    if memory.offloaded:
        lines.append(
            f"  {'layer inputs on the host':<28} {memory.offloaded / GIB:8.3f} GiB of {host_bytes() / GIB:.1f}"
        )
    there_is = "" if plan.limit is None else f" of {plan.limit / GIB:.2f}"
    lines.append(f"  {'predicted peak':<28} {memory.peak / GIB:8.3f} GiB{there_is}")
    again, most = recompute_seconds(work, plan.remat), recompute_seconds(work, "full")
    share = again / most if most else 0.0
    lines.append(f"  computed again in the backward pass: {share:.0%} of what full computes again")
    return lines
