"""One attention head on one sequence: parameters, masks, the forward pass.

Everything here takes arrays without a batch axis; callers `vmap`. Letters in shapes:
T positions, d_x inputs, d_k keys, d_v values, C classes; `weight` is the paper's a.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

# Query rows that are worked on together, and the most groups that rows are cut into:
# under a causal mask a group has its own number of sources, and is its own piece of
# program, so that more of them waste less of the masked half but compile more slowly.
_BLOCK = 128
_MAX_GROUPS = 8

# Of the variance of a value that `layer_norm` divides by, in a head.
NORM_EPSILON = 1e-5

# Sources as a slice, and which of them each query may see (sources, B); None: all.
Tile = tuple[slice, jax.Array | None]


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
    weight: jax.Array  # (T, T), rows sum to 1, or to 0 where nothing is allowed
    context: jax.Array  # (T, d_v)
    logit: jax.Array  # (T, C)


class Readout(NamedTuple):
    """What a head says, and how widely it looked, without its T x T arrays."""

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


def causal_mask(length: int) -> np.ndarray:
    """Which sources a causal head may look at: m_ij = (j ≤ i), diagonal included.

    A NumPy constant, so that whoever is given it can tell while tracing that it is
    causal (`is_causal`) and skip the half that is masked.

    Args:
      length: T, at least 1.

    Returns:
      Boolean (T, T).

    Raises:
      ValueError: the length is not a whole number, or below 1.
    """
    check_size("length", length)
    return np.tri(length, dtype=bool)


def check_size(name: str, size: int, least: int = 1, most: int | None = None) -> None:
    """Raises ValueError, naming it, unless a size is a whole number in this range."""
    whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if not whole or size < least or (most is not None and size > most):
        range_ = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={size!r}: allowed: a whole number, {range_}")


def is_causal(mask) -> bool:
    """Whether `mask` is known, while tracing, to be the causal mask."""
    if mask is None or isinstance(mask, jax.core.Tracer):
        return False
    return np.array_equal(mask, causal_mask(len(mask)))


def scores(
    query: jax.Array, key: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """How well each source fits each query, before any mask.

    s_ij = q_i·k_j / √d_k + bias_ij

    Args:
      query: q (T, d_k).
      key: k (S, d_k).
      bias: added to the scores, (T, S) or with a 1 in place of T or S; -inf rules a
        source out, as a mask does, whatever its key.

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
      score: s (T, S); -inf rules a source out.
      mask: boolean (T, S), True where i may look at j; None looks everywhere.

    Returns:
      a (T, S), at least 0; rows sum to 1, or are all 0 where nothing is allowed.
    """
    chex.assert_rank(score, 2)
    allowed = score != -jnp.inf  # a NaN stays, and shows
    if mask is not None:
        chex.assert_shape(mask, score.shape)
        chex.assert_type(mask, bool)
        allowed &= jnp.asarray(mask)
    return jax.nn.softmax(score, where=allowed)


def attention_entropy(weight: jax.Array) -> jax.Array:
    """How widely each query looks.

    H_i = -Σ_j a_ij log a_ij

    Args:
      weight: a (T, S).

    Returns:
      (T,) in nats, from 0 (one source, or none) to log S (all alike). Its gradient is
      finite too: taken as 0 for a weight that is exactly 0.
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
    """The slices of several heads that lie side by side: (T, H d) -> (T, H, d).

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
    """Gives each query head the key-value head that it shares (grouped-query).

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
    """What a head finds: v_j = x_j W_V, or its `layer_norm`.

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
    """Forward pass of one head on one sequence, keeping everything.

    s_ij = q_i·k_j / √d_k,  a_i = softmax(s_i over allowed j),  g_i = Σ_j a_ij v_j,
    l_i = g_i W_O + b_O

    A row whose mask allows nothing has zero weight everywhere and zero context. A query
    is a matter of the sources that it may look at alone: where one of these is not
    finite it is NaN, and what it may not look at is never read, nor is a position that
    neither looks nor is looked at.

    Args:
      params: of the head.
      inputs: x (T, d_x).
      mask: boolean (T, T), True where i may look at j; None looks everywhere.
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
    with e_ij = exp(s_ij - max_i), n_i = Σ_j e_ij; 0 for a row with nothing allowed

    Args:
      params: of the head.
      inputs: x (T, d_x).
      mask: as in `forward`; half the work if it is known to be causal.
      value_norm: see `values`.

    Returns:
      Readout; entropies between 0 and the log of the number of allowed sources.
    """
    assert_head_shapes(params, inputs, mask)
    inputs = only_used(inputs, mask)
    query = inputs @ (params.w_q / math.sqrt(params.w_q.shape[1]))
    key = inputs @ params.w_k
    value = values(params, inputs, value_norm=value_norm)
    sound = (finite_rows(key) & finite_rows(value))[:, None]
    key = jnp.where(sound, key, jnp.nan)  # and so the scores of who may look there
    value_and_one = append_one(jnp.where(sound, value, 0)).T

    def block(tiles: list[Tile], query: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def only_used(inputs: jax.Array, mask, share: jax.Array | None = None) -> jax.Array:
    """Inputs, and 0 in place of what is not finite and of no use to the loss.

    Position j is used where it counts as a query (share_j ≠ 0, and it may look
    somewhere), or some query that counts may look at it. Padding, whatever is in it,
    then reaches no number and no gradient.

    Args:
      inputs: x (T, d_x).
      mask: boolean (T, T), True where i may look at j; None looks everywhere.
      share: of each query in the loss (T,); default: those that may look somewhere.

    Returns:
      (T, d_x).
    """
    causal = is_causal(mask)
    if mask is None or (share is None and causal):
        return inputs
    counts = True if causal else jnp.any(jnp.asarray(mask), axis=1)
    counts = counts if share is None else counts & (share != 0)
    if causal:  # without an array of all pairs
        used = jax.lax.cummax(counts.astype(jnp.int8), reverse=True) > 0
    else:
        used = counts | jnp.any(jnp.asarray(mask) & counts[:, None], axis=0)
    return jnp.where((used | finite_rows(inputs))[:, None], inputs, 0)


def finite_rows(array: jax.Array) -> jax.Array:
    """Which rows (n,) of an array (n, d) have nothing but finite numbers."""
    return jnp.isfinite(array).all(axis=1)


def over_row_blocks(function: Callable, mask, *rows: jax.Array):
    """Maps a function over blocks of query rows, one after another.

    A block's T-wide arrays then share one small piece of memory that stays in cache
    (measured on CPU: 1.4 times as fast as all blocks side by side).

    Args:
      function: (tiles, *block of each of `rows`) -> pytree of results, one per row. The
        tiles list the sources that the block may look at.
      mask: (T, T) or None; under a known causal mask later sources are left out.
      rows: arrays (T, ...).

    Returns:
      Pytree of results (T, ...).
    """
    length = len(rows[0])
    causal = is_causal(mask)
    block, group = _block_sizes(length, causal)
    masks = () if causal or mask is None else (jnp.asarray(mask),)

    def one(start: int, index: jax.typing.ArrayLike, rows: tuple) -> tuple:
        if causal:
            diagonal = slice(start, min(start + group, length))
            source = jnp.arange(diagonal.stop - start)[:, None]
            tiles = [(diagonal, source <= index * block + jnp.arange(block)[None])]
            tiles = [(slice(0, start), None), *tiles] if start > 0 else tiles
        elif masks:
            tiles = [(slice(0, length), rows[0].T)]
        else:
            tiles = [(slice(0, length), None)]
        return function(tiles, *rows[len(masks) :])

    if block == length:  # a loop of one: nothing to save, and a program to compile
        return one(0, 0, (*masks, *rows))

    blocks = jax.tree.map(lambda row: _pad(row, -length % group), (*masks, *rows))
    blocks = jax.tree.map(
        lambda row: row.reshape(-1, group // block, block, *row.shape[1:]), blocks
    )
    results = []
    for number, start in enumerate(range(0, length, group)):
        of_group = jax.tree.map(lambda row, n=number: row[n], blocks)
        step = functools.partial(one, start)
        results.append(
            jax.lax.map(
                lambda xs, f=step: f(*xs), (np.arange(group // block), of_group)
            )
        )
    return jax.tree.map(
        lambda *parts: jnp.concatenate(
            [part.reshape(group, *part.shape[2:]) for part in parts]
        )[:length],
        *results,
    )


def shifted_scores(
    query: jax.Array, key: jax.Array, tiles: list[Tile]
) -> list[tuple[slice, jax.Array]]:
    """Scores of one block of queries, less the largest of each query, transposed.

    Sources run down and queries across: every product that follows then reads memory in
    order (measured: a quarter faster on CPU than queries down).

    Args:
      query: q / √d_k of the block (B, d_k).
      key: (T, d_k).
      tiles: from `over_row_blocks`.

    Returns:
      Pairs of a slice of sources, and s_ij - max_j s_ij (sources, B), -inf where
      masked. Their exponentials lie in [0, 1]; all are 0 if nothing is allowed.
    """
    scores = []
    for sources, allowed in tiles:
        score = key[sources] @ query.T
        scores.append(score if allowed is None else jnp.where(allowed, score, -jnp.inf))
    largest = functools.reduce(jnp.maximum, [jnp.max(s, axis=0) for s in scores])
    # -inf - (-inf) would be NaN in a row that may look nowhere.
    largest = jnp.where(largest > -jnp.inf, largest, 0)
    return [
        (sources, score - largest[None])
        for (sources, _), score in zip(tiles, scores, strict=True)
    ]


def _block_sizes(length: int, causal: bool) -> tuple[int, int]:
    """Rows of a block, and of a group of blocks that have the same sources."""
    if length <= 2 * _BLOCK:
        return length, length
    blocks = -(-length // _BLOCK)
    return _BLOCK, _BLOCK * (max(2, -(-blocks // _MAX_GROUPS)) if causal else blocks)


def _pad(array: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(array, [(0, rows)] + [(0, 0)] * (array.ndim - 1))


def append_one(array: jax.Array) -> jax.Array:
    """A last column of ones: one product then sums rows and weights together."""
    return jnp.concatenate([array, jnp.ones_like(array[:, :1])], axis=1)


def assert_head_shapes(params: Params, inputs: jax.Array, mask) -> None:
    """Raises AssertionError where the shapes of a head and its input do not fit.

    And ValueError where one has an empty axis.
    """
    chex.assert_rank([params.w_q, params.w_k, params.w_v, params.w_o, inputs], 2)
    if 0 in inputs.shape + params.w_q.shape + params.w_o.shape:
        raise ValueError(
            f"inputs {inputs.shape}, w_q {params.w_q.shape}, w_o {params.w_o.shape}:"
            " allowed: no empty axis"
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
