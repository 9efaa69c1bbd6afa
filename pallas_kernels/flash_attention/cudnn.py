"""NVIDIA's fused attention, called through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _platform

_PAD_MULTIPLE = 128


def refuses(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    *,
    causal: bool,
    own_ids: bool,
    scale: float | None,
    softcap: float | None,
    sinks: bool,
    lse: bool,
) -> str | None:
    """Return why cuDNN cannot do these arguments on the default device, or None.

    `own_ids` tells whether the keys have segment ids of their own instead of sharing the queries', `sinks`
    whether heads have sinks, `lse` whether the log-sum-exp is asked for.
    """
    width = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and q is {q.dtype}"
    if width % 8 or width > 256:
        return f"the head width must be a multiple of 8 up to 256, and is {width}"
    if softcap is not None:
        return f"it has no softcap, and softcap is {softcap}"
    if causal and q.shape[1] != k.shape[1]:
        return f"its causal mask lines up the first tokens, so T must equal S; T is {q.shape[1]} and S is {k.shape[1]}"
    if sinks:
        return "it has no sinks, and sinks are given"
    if lse:
        return "its log-sum-exp has no gradient, and return_lse is set"
    if own_ids:
        return "keys with segment ids of their own can leave a query without a key, which it does not define"
    if isinstance(scale, jax.Array):
        return "scale must be a Python number, as it is compiled into the kernel"
    capability = _platform.compute_capability()
    if capability is None:
        return _platform.why_not_gpu()
    needed = (9, 0) if width > 128 else (8, 0)
    if capability < needed:
        return f"head width {width} needs compute capability {needed}; this GPU has {capability}"
    if not causal and (q.shape[1] % 2 or k.shape[1] % 2):
        return f"its lengths must be even where no causal mask hides padding; T is {q.shape[1]} and S is {k.shape[1]}"
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool,
    window: int | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attend with cuDNN.

    Segments become a dense mask of T * T values (cuDNN adds it as a bias in q's dtype), so packed rows cost memory
    that grows with T squared. Its traps are stepped around:
    - odd lengths are refused: causal rows get one token of padding, which no query before it sees;
    - with a mask and T % 128 == 64 its backward returns NaN (pytorch issue 196678): T is padded to a multiple of 128;
    - rows without a key are undefined: padding attends to padding, and its rows are zeroed afterwards, which also
      zeroes what they would send back to k and v;
    - a sliding window together with a bias is not supported: the window goes into the mask.
    """
    tokens = q.shape[1]
    multiple = _PAD_MULTIPLE if segment_ids is not None else 2 if causal else 1
    padding = -tokens % multiple
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    if segment_ids is None:
        local = None if window is None or window >= tokens else (window - 1, 0)  # cuDNN's bound leaves out self
        out = jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, local_window_size=local, implementation="cudnn"
        )
        return out[:, :tokens]
    ids_BT = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    out = jax.nn.dot_product_attention(
        q, k, v, mask=_mask(ids_BT, window)[:, None], scale=scale, is_causal=causal, implementation="cudnn"
    )
    return jnp.where(segment_ids[:, :, None, None] != 0, out[:, :tokens], 0)


def _mask(ids_BT: Int[Array, "B T"], window: int | None) -> Array:
    mask_BTT = ids_BT[:, :, None] == ids_BT[:, None, :]
    if window is not None:
        position = jnp.arange(ids_BT.shape[1])
        mask_BTT &= position[:, None] - position[None, :] < window
    return mask_BTT
