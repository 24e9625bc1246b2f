"""`streaming.attend` as the `attention_fn` of Flax's attention layers.

    nnx.MultiHeadAttention(..., attention_fn=flax_attention.dot_product_attention)
    nnx.MultiHeadAttention(..., attention_fn=flax_attention.TappedAttention(S, (N, H)))
    linen.MultiHeadDotProductAttention(
        ..., attention_fn=partial(flax_attention.dot_product_attention, tap=tap))

Letters in shapes: T queries, S sources, H heads, H_kv key-value heads; `...` are any
number of axes of examples.
"""

import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxattn.kernels import streaming


class Tap(nnx.Variable):
    """A tap: the gradient with respect to it is `LawStatistics`."""


class TappedAttention(nnx.Module):
    """An `attention_fn` with a tap, for `nnx.MultiHeadAttention`.

    The statistics of the layer then are part of the gradient:

    nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Any(nnx.Param, Tap)))(model)

    Under a loss that is a mean over N examples, u, A and their norms are 1/N of those
    of one example's loss. The tap fits one shape of calls; for others, such as in
    evaluation, set the layer's `attention_fn` to `dot_product_attention`.
    """

    def __init__(self, num_sources: int, leading: tuple[int, ...], dtype=jnp.float32):
        """Makes the tap.

        Args:
          num_sources: S of every call.
          leading: axes of examples of every call, then H.
          dtype: of the statistics.
        """
        self.tap = Tap(streaming.zero_tap(num_sources, leading, dtype))

    def __call__(self, *args, **kwargs) -> jax.Array:
        """`dot_product_attention` with this tap."""
        return dot_product_attention(*args, tap=self.tap.get_value(), **kwargs)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype=None,
    precision: jax.lax.PrecisionLike = None,
    module=None,
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable | None = None,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
    *,
    tap: streaming.LawStatistics | None = None,
) -> jax.Array:
    """Drop-in for `dot_product_attention` of `flax.nnx` and of `flax.linen`.

    g_i = Σ_j c_ij a_ij v_j of `streaming.attend`, c_ij the factors of dropout

    Same outputs, gradients and dropout masks as Flax's (masks: see `dropout_key` of
    `attend`), without T x S arrays except for the gradient of a bias. A fully masked
    query gets zeros, with Flax the mean of all values; the softmax is never in less
    than float32.

    Args:
      query: (..., T, H, d_k).
      key: (..., S, H_kv, d_k).
      value: (..., S, H_kv, d_v).
      bias: broadcastable to (..., H, T, S), added to the scores.
      mask: boolean, or 0 and 1, shape as for the bias; True where i may attend to j.
      broadcast_dropout: drops the same weights in all heads and examples.
      dropout_rng: random key, required if any weight is dropped.
      dropout_rate: share of weights that is dropped, unless `deterministic`.
      deterministic: drops no weights.
      dtype: that the arrays are converted to; default: their common dtype.
      precision: of the matrix products.
      module: must be None: there are no weights to sow; use a tap.
      promote_dtype: must be None: the conversion is that of Flax.
      is_causal: masks sources j > i, both counted from the first.
      force_fp32_for_softmax: has no effect: the softmax always is.
      einsum_dot_general: must be None, as the next two: products are `attend`'s.
      qk_attn_weights_einsum: must be None.
      attn_weights_value_einsum: must be None.
      tap: `streaming.zero_tap(S, (..., H))`; its gradient is the statistics.

    Returns:
      (..., T, H, d_v).

    Raises:
      ValueError: an option is not supported, or a shape is wrong.

    Source: arXiv 1706.03762, section 3.2; arXiv 2305.13245 for fewer key-value heads.
    """
    _refuse(
        module=module,
        promote_dtype=promote_dtype,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    query, key, value = linen.dtypes.promote_dtype(query, key, value, dtype=dtype)
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"{shapes}: must be (..., length, heads, width), same ...")
    *examples, length, num_heads, _ = query.shape
    sources = key.shape[-3]
    shape = (*examples, num_heads, length, sources)

    mask = streaming.full_rank("mask", mask, shape)
    bias = streaming.full_rank("bias", bias, shape)
    mask = None if mask is None else mask.astype(bool)
    slots = None
    if deterministic:
        dropout_rate = 0.0
    elif dropout_rate > 0:
        if dropout_rng is None:
            raise ValueError(
                f"dropout_rng=None: must be a random key, as {dropout_rate=}"
            )
        if broadcast_dropout:
            slots = np.zeros((1,) * len(examples) + (num_heads,), np.uint32)
        else:
            slots = np.arange(math.prod(shape[:-2]), dtype=np.uint32)
            slots = slots.reshape(shape[:-2])
    streaming.check_tap(tap, shape[:-2], sources)

    def one(query, key, value, mask, bias, slots, tap):
        return streaming.attend(
            query,
            key,
            value,
            # `attend` aligns the last of both, Flax the first.
            window=(None, length - sources) if is_causal else None,
            mask=mask,
            bias=bias,
            dropout_rate=dropout_rate,
            dropout_key=dropout_rng,
            dropout_slot=slots,
            precision=precision,
            tap=tap,
        )

    arrays, axes = [query, key, value], [[0, 0, 0] for _ in examples]
    for array in (mask, bias, slots):
        array, array_axes = _shared(array, len(examples))
        arrays.append(array)
        for of_axis, axis in zip(axes, array_axes, strict=True):
            of_axis.append(axis)
    for of_axis in reversed(axes):
        one = jax.vmap(one, in_axes=(*of_axis, None if tap is None else 0))
    return one(*arrays, tap)


def _refuse(**options) -> None:
    for name, option in options.items():
        if option is not None:
            advice = "; use a tap instead" if name == "module" else ""
            raise ValueError(f"{name}={type(option).__name__}: must be None{advice}")


def _shared(array, examples: int):
    """An array without its example axes of length 1, and the axes for `vmap`."""
    if array is None:
        return None, [None] * examples
    single = [axis for axis in range(examples) if array.shape[axis] == 1]
    axes = [None if axis in single else 0 for axis in range(examples)]
    return array.squeeze(tuple(single)), axes


# Linen passes only the options that it finds in the signature.
_options = list(inspect.signature(dot_product_attention).parameters.values())[:-1]
TappedAttention.__call__.__signature__ = inspect.Signature(
    [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *_options]
)
