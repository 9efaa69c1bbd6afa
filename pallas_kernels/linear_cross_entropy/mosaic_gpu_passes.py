"""The loss' passes over a chunk's products by the Hopper kernel, in the form that reference.py calls them in."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.linear_cross_entropy import mosaic_gpu
from pallas_kernels.linear_cross_entropy.mosaic_gpu import LABEL, SUM, TOP, TOTAL, Form
from pallas_kernels.linear_cross_entropy.reference import Outcome, Passes, Settings, bounded, factor_of, loss_of


def form_of(how: Settings) -> Form:
    """What the kernel has to know of the settings."""
    return Form(how.scale, how.softcap, how.smoothing, how.z_loss)


def _outcome(products: Array, labels: Array, how: Settings) -> Outcome:
    rows = _rows(products)
    return _loss(mosaic_gpu.statistics(rows, labels.reshape(-1), form_of(how)), labels, rows.shape[1], how)


def _both(products: Array, labels: Array, weights: Array, how: Settings, room: Array, index: Array):
    rows, factor = _rows(products), factor_of(weights, labels, how)
    told, filled = mosaic_gpu.statistics_and_gradient(
        rows, labels.reshape(-1), factor.reshape(-1), room.reshape(-1, *rows.shape), index, form_of(how)
    )
    return _loss(told, labels, rows.shape[1], how), filled.reshape(room.shape)


def _gradient(
    products: Array, lse: Array, labels: Array, weights: Array, how: Settings, room: Array, index: Array
) -> Array:
    rows, each = _rows(products), (labels, factor_of(weights, labels, how), lse)
    labels, factor, lse = (one.reshape(-1) for one in each)
    room_NMV = room.reshape(-1, *rows.shape)
    return mosaic_gpu.gradient(rows, labels, factor, lse, room_NMV, index, form_of(how)).reshape(room.shape)


PASSES = Passes(_outcome, _both, _gradient)


def _rows(products: Array) -> Array:
    return products.reshape(-1, products.shape[-1])


def _loss(told: Array, labels: Array, vocabulary: int, how: Settings) -> Outcome:
    scale = how.scale if how.softcap is None else 1.0  # of what is not a logit yet
    lse = (scale * told[TOP] + jnp.log(told[TOTAL])).reshape(labels.shape)
    label_logit = bounded(told[LABEL], how).reshape(labels.shape)
    mean = (told[SUM] * (scale / vocabulary)).reshape(labels.shape) if how.smoothing else None
    return Outcome(loss_of(lse, label_logit, mean, labels, vocabulary, how), lse, None, None)
