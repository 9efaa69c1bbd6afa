"""What a training step needs of a device's memory, predicted before anything is loaded or compiled.

What stays (weights, optimizer state) and what the backward pass finds is measured, on shapes: the step's own forward
pass is traced, and what it keeps is added up. The rest is what is alive at the widest moments (moments.py).
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jaxtyping import PyTree

from gymjax.training.moments import gathered_bytes, layer_bytes, loss_bytes, tied_bytes, update_bytes
from gymjax.training.step import batch_loss
from gymjax.training.workload import Workload, abstract_batch, device_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they are for.

    Attributes:
        frozen: weights that are not trained.
        trained: weights that are, f32.
        optimizer: its state.
        batch: token ids, targets, weights.
        gradients: of the trained weights; two sets where microbatches are summed.
        inputs: what every layer (or group of them) was given.
        offloaded: of these, what lies in the host's memory.
        kept: what else the backward pass finds.
        loss: of the head on one chunk of tokens: logits and their gradient.
        layer: widest moment of one layer's backward pass.
        update: of the optimizer's, beside gradients.
    """

    frozen: int
    trained: int
    optimizer: int
    batch: int
    gradients: int
    inputs: int
    offloaded: int
    kept: int
    loss: int
    layer: int
    update: int

    @property
    def resident(self) -> int:
        """Bytes between two steps."""
        return self.frozen + self.trained + self.optimizer + self.batch

    @property
    def peak(self) -> int:
        """Most bytes at once: a chunk's loss comes before the gradients, unless earlier microbatches left some."""
        summed = self.gradients // 2 if self.gradients > self.trained else 0
        held = self.inputs - self.offloaded + self.kept
        step = held + max(self.loss + summed, self.layer + self.gradients)
        return self.resident + max(step, self.gradients - summed + self.update)


def predict(work: Workload, remat: str) -> Memory:
    """Memory of a step with this rematerialisation, see Decoder.trunk."""
    trained = device_bytes(work.state.params)
    places = sum(stack.repeats + (remat == "offload") for stack in work.cfg.stacks)  # see `scan_offloaded`
    inputs = places * work.tokens * work.cfg.width * work.dtype.itemsize
    return Memory(
        frozen=device_bytes(work.frozen),
        trained=trained,
        optimizer=device_bytes(work.state.opt_state),
        batch=5 * 4 * work.accumulation * work.tokens,
        gradients=trained * min(2, work.accumulation),
        inputs=inputs,
        offloaded=inputs if remat == "offload" else 0,
        kept=max(0, kept_bytes(work, remat) - inputs) + gathered_bytes(work),
        loss=loss_bytes(work),
        layer=layer_bytes(work, remat) + tied_bytes(work),
        update=update_bytes(work),
    )


def kept_bytes(work: Workload, remat: str) -> int:
    """Bytes that the forward pass leaves for the backward pass, found by tracing both; nothing is computed.

    Weights and the batch, which are there anyway, do not count.
    """
    settings = dataclasses.replace(work.settings, remat=remat)

    def residuals(params: nnx.State, frozen: nnx.State, batch: dict[str, jax.Array]) -> list[jax.Array]:
        def loss(params: nnx.State) -> jax.Array:
            return batch_loss(nnx.merge(work.graphdef, params, frozen), batch, settings, jax.random.key(0))[0]

        given = {id(leaf) for leaf in jax.tree.leaves((params, frozen, batch))}
        return [leaf for leaf in jax.tree.leaves(jax.vjp(loss, params)[1]) if id(leaf) not in given]

    params, frozen = (_unsharded(tree) for tree in (work.state.params, work.frozen))
    kept = jax.eval_shape(residuals, params, frozen, abstract_batch(work.rows, work.length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def _unsharded(tree: PyTree) -> PyTree:
    """One device's work does not depend on how the others share the weights."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
