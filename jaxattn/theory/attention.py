"""One attention head on one sequence: parameters, scores, weights, the forward pass.

Everything here takes arrays without a batch axis; callers `vmap`. Letters in shapes:
T positions, d_x inputs, d_k keys, d_v values, C classes; `weight` is the paper's a.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.theory.masks import causal_mask, finite_rows, is_causal, only_used
from jaxattn.theory.row_blocks import append_one, over_row_blocks, shifted_scores
from jaxattn.theory.sizes import check_size

__all__ = [
    "NORM_EPSILON",
    "Forward",
    "Params",
    "Readout",
    "assert_head_shapes",
    "attention_entropy",
    "causal_mask",
    "check_size",
    "forward",
    "init_params",
    "is_causal",
    "layer_norm",
    "read_out",
    "readout",
    "repeat_heads",
    "scores",
    "split_heads",
    "values",
    "weights",
]

# What `layer_norm` adds to the variance of a head's values.
NORM_EPSILON = 1e-5


class Params(NamedTuple):
    """Weights of one head and its read-out; matrices multiply from the right."""

    w_q: jax.Array  # (d_x, d_k)
    w_k: jax.Array  # (d_x, d_k)
    w_v: jax.Array  # (d_x, d_v)
    w_o: jax.Array  # (d_v, C)
    b_o: jax.Array | None = None  # (C,)


class Forward(NamedTuple):
    """All that the forward pass computes; the laws are functions of it."""

    query: jax.Array  # (T, d_k)
    key: jax.Array  # (T, d_k)
    value: jax.Array  # (T, d_v)
    score: jax.Array  # (T, T), before the mask
    weight: jax.Array  # (T, T), rows sum to 1, or to 0 if fully masked
    context: jax.Array  # (T, d_v)
    logit: jax.Array  # (T, C)


class Readout(NamedTuple):
    """Logits of a head and entropies of its weights, without any T x T array."""

    logit: jax.Array  # (T, C)
    attention_entropy: jax.Array  # (T,), nats


def init_params(
    key: jax.Array,
    *,
    d_x: int,
    d_k: int,
    d_v: int,
    num_classes: int,
    scale: float = 0.1,
    bias: bool = False,
    dtype=jnp.float32,
) -> Params:
    """Draws independent weights, each N(0, scale²); the bias, if any, starts at 0.

    Args:
      key: random key.
      d_x: width of the inputs, at least 1.
      d_k: width of queries and keys, at least 1.
      d_v: width of the values, at least 1.
      num_classes: C, at least 1.
      scale: standard deviation of every weight.
      bias: whether the read-out has a bias.
      dtype: of the weights.

    Returns:
      Params.

    Raises:
      ValueError: a size below 1.
    """
    for name, size in (
        ("d_x", d_x),
        ("d_k", d_k),
        ("d_v", d_v),
        ("num_classes", num_classes),
    ):
        check_size(name, size)
    shapes = {
        "w_q": (d_x, d_k),
        "w_k": (d_x, d_k),
        "w_v": (d_x, d_v),
        "w_o": (d_v, num_classes),
    }
    weights = {
        name: scale * jax.random.normal(subkey, shape, dtype)
        for (name, shape), subkey in zip(
            shapes.items(), jax.random.split(key, len(shapes)), strict=True
        )
    }
    return Params(**weights, b_o=jnp.zeros(num_classes, dtype) if bias else None)


def scores(
    query: jax.Array, key: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Scores of all pairs of a query and a source, before any mask.

    s_ij = q_i·k_j / √d_k + bias_ij

    Args:
      query: q (T, d_k).
      key: k (S, d_k).
      bias: added to the scores, (T, S) or with a 1 in place of T or S; -inf masks a
        source, whatever its key.

    Returns:
      s (T, S).
    """
    chex.assert_rank([query, key], 2)
    chex.assert_equal_shape_suffix([query, key], 1)
    score = query @ key.T / math.sqrt(query.shape[1])
    if bias is None:
        return score
    chex.assert_shape(bias, ({1, len(query)}, {1, len(key)}))
    return jnp.where(bias == -jnp.inf, -jnp.inf, score + bias)


def weights(score: jax.Array, mask=None) -> jax.Array:
    """Attention weights, the responsibility of each source for each query.

    a_ij = m_ij exp(s_ij) / Σ_l m_il exp(s_il)

    Args:
      score: s (T, S); -inf masks a source.
      mask: boolean (T, S), True where i may attend to j; None allows all.

    Returns:
      a (T, S), at least 0; rows sum to 1, or are all 0 if fully masked.
    """
    chex.assert_rank(score, 2)
    allowed = score != -jnp.inf  # a NaN is allowed, so that it shows
    if mask is not None:
        chex.assert_shape(mask, score.shape)
        chex.assert_type(mask, bool)
        allowed &= jnp.asarray(mask)
    return jax.nn.softmax(score, where=allowed)


def attention_entropy(weight: jax.Array) -> jax.Array:
    """Entropy of the attention weights of each query.

    H_i = -Σ_j a_ij log a_ij

    Args:
      weight: a (T, S).

    Returns:
      (T,) in nats, from 0 (one source, or none) to log S (all weights equal). Its
      gradient is finite too: taken as 0 for a weight that is exactly 0.
    """
    chex.assert_rank(weight, 2)
    unused = weight == 0  # a NaN is neither, and shows
    term = -weight * jnp.log(jnp.where(unused, 1, weight))
    return jnp.sum(jnp.where(unused, 0, term), axis=1)


def layer_norm(value: jax.Array, epsilon: float) -> jax.Array:
    """LayerNorm without scale or shift.

    LN(ṽ_j) = (ṽ_j - mean ṽ_j) / √(var ṽ_j + ε)

    Args:
      value: ṽ (S, d_v).
      epsilon: added to the variance, above 0.

    Returns:
      v (S, d_v): mean 0, root mean square 1 where the variance is well above ε.
    """
    chex.assert_rank(value, 2)
    centred = value - jnp.mean(value, axis=1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True) + epsilon)


def split_heads(array: jax.Array, num_heads: int) -> jax.Array:
    """Splits an array into the slices of its heads: (T, H d) -> (T, H, d).

    Args:
      array: (T, H d), such as queries, contexts or their gradients.
      num_heads: H, a divisor of the width.

    Returns:
      (T, H, d).
    """
    chex.assert_rank(array, 2)
    check_size("num_heads", num_heads)
    chex.assert_is_divisible(array.shape[1], num_heads)
    return array.reshape(len(array), num_heads, -1)


def repeat_heads(array: jax.Array, num_heads: int) -> jax.Array:
    """Copies each key-value head for the query heads that share it (grouped-query).

    Query head h of H uses key-value head h // (H / H_kv).

    Args:
      array: keys or values (S, H_kv, d).
      num_heads: H, a multiple of H_kv.

    Returns:
      (S, H, d).
    """
    chex.assert_rank(array, 3)
    check_size("heads of the keys or values", array.shape[1])
    chex.assert_is_divisible(num_heads, array.shape[1])
    sources, num_kv_heads, depth = array.shape
    copies = num_heads // num_kv_heads
    # Not `jnp.repeat`, which on a mesh with explicit axes asks how to shard.
    array = jnp.broadcast_to(array[:, :, None], (sources, num_kv_heads, copies, depth))
    return array.reshape(sources, num_heads, depth)


def read_out(params: Params, context: jax.Array) -> jax.Array:
    """Logits of a context: l_i = g_i W_O + b_O.

    Args:
      params: of the head.
      context: g (T, d_v).

    Returns:
      (T, C).
    """
    logit = context @ params.w_o
    return logit if params.b_o is None else logit + params.b_o[None]


def values(params: Params, inputs: jax.Array, *, value_norm: bool = False) -> jax.Array:
    """Values of a head: v_j = x_j W_V, or their `layer_norm`.

    Args:
      params: of the head.
      inputs: x (S, d_x).
      value_norm: whether a LayerNorm without scale and shift is applied.

    Returns:
      v (S, d_v).
    """
    value = inputs @ params.w_v
    return layer_norm(value, NORM_EPSILON) if value_norm else value


def forward(
    params: Params, inputs: jax.Array, mask=None, *, value_norm: bool = False
) -> Forward:
    """Forward pass of one head on one sequence, with all intermediate arrays.

    s_ij = q_i·k_j / √d_k,  a_i = softmax(s_i over allowed j),  g_i = Σ_j a_ij v_j,
    l_i = g_i W_O + b_O

    A fully masked row has zero weights and a zero context. A query depends on its
    unmasked sources alone: where one of these is not finite the query is NaN, and
    masked sources are never read, nor is a position that is masked as query and source.

    Args:
      params: of the head.
      inputs: x (T, d_x).
      mask: boolean (T, T), True where i may attend to j; None allows all.
      value_norm: see `values`.

    Returns:
      Forward.

    Source: arXiv 2512.22473, section 2.
    """
    assert_head_shapes(params, inputs, mask)
    inputs = only_used(inputs, mask)
    query, key = inputs @ params.w_q, inputs @ params.w_k
    value = values(params, inputs, value_norm=value_norm)
    sound = finite_rows(key) & finite_rows(value)
    clean_key, clean_value = (
        jnp.where(sound[:, None], array, 0) for array in (key, value)
    )
    score = jnp.where(sound[None], scores(query, clean_key), jnp.nan)
    weight = weights(score, mask)
    context = weight @ clean_value
    return Forward(query, key, value, score, weight, context, read_out(params, context))


def readout(
    params: Params, inputs: jax.Array, mask=None, *, value_norm: bool = False
) -> Readout:
    """Logits and attention entropy of `forward`, row block by row block.

    H_i = -Σ_j a_ij log a_ij = log n_i - Σ_j e_ij (s_ij - max_i) / n_i,
    with e_ij = exp(s_ij - max_i), n_i = Σ_j e_ij; 0 for a fully masked row

    Args:
      params: of the head.
      inputs: x (T, d_x).
      mask: as in `forward`; half the work if it is known to be causal.
      value_norm: see `values`.

    Returns:
      Readout; entropies between 0 and the log of the number of unmasked sources.
    """
    assert_head_shapes(params, inputs, mask)
    inputs = only_used(inputs, mask)
    query = inputs @ (params.w_q / math.sqrt(params.w_q.shape[1]))
    key = inputs @ params.w_k
    value = values(params, inputs, value_norm=value_norm)
    sound = (finite_rows(key) & finite_rows(value))[:, None]
    key = jnp.where(sound, key, jnp.nan)  # so that scores of its queries are NaN
    value_and_one = append_one(jnp.where(sound, value, 0)).T

    def block(tiles, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        summed, spread = 0, 0
        for sources, score in shifted_scores(query, key, tiles):
            exponential = jnp.exp(score)
            summed += value_and_one[:, sources] @ exponential
            finite = jnp.where(exponential > 0, score, 0)
            spread += jnp.sum(exponential * finite, axis=0)
        normaliser = jnp.where(summed[-1] > 0, summed[-1], 1)
        context = (summed[:-1] / normaliser[None]).T
        return context, jnp.log(normaliser) - spread / normaliser

    context, entropy = over_row_blocks(block, mask, query)
    return Readout(read_out(params, context), entropy)


def assert_head_shapes(params: Params, inputs: jax.Array, mask) -> None:
    """Checks that the shapes of a head, its inputs and its mask fit.

    Args:
      params: of the head.
      inputs: x (T, d_x).
      mask: boolean (T, T), or None.

    Raises:
      AssertionError: the shapes do not fit.
      ValueError: an axis is empty.
    """
    chex.assert_rank([params.w_q, params.w_k, params.w_v, params.w_o, inputs], 2)
    if 0 in inputs.shape + params.w_q.shape + params.w_o.shape:
        raise ValueError(
            f"inputs {inputs.shape}, w_q {params.w_q.shape}, w_o {params.w_o.shape}:"
            " must have no empty axis"
        )
    length, d_x = inputs.shape
    d_v, num_classes = params.w_o.shape
    chex.assert_shape([params.w_q, params.w_k], (d_x, params.w_q.shape[1]))
    chex.assert_shape(params.w_v, (d_x, d_v))
    if params.b_o is not None:
        chex.assert_shape(params.b_o, (num_classes,))
    if mask is not None:
        chex.assert_shape(mask, (length, length))
        chex.assert_type(mask, bool)
