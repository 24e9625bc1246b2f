"""Blocks of queries against blocks of sources: loops over them, scores, slices.

Blocks of scores are transposed (sources down, queries across), so that sums over
sources and most products read memory in order.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.theory import laws, masks


class Plan(NamedTuple):
    """The static part of a call."""

    rows: int  # queries of a block
    columns: int  # sources of a block
    low: int | None  # i attends to j ≥ i + low
    high: int | None  # and to j ≤ i + high
    dropout_rate: float
    precision: jax.lax.PrecisionLike


class SideInputs(NamedTuple):
    """Inputs without a gradient that scores and weights depend on; None: not given."""

    mask: jax.Array | None  # (1 or T, 1 or S)
    key_length: jax.Array | None  # ()
    dropout: tuple | None  # two words of a key, and a slot


class Rows(NamedTuple):
    """A block of queries; the last one is moved back to end where the queries end."""

    first: jax.Array
    new: jax.Array  # the first that no block before contains


class Tile(NamedTuple):
    """A block of queries against a block of sources.

    The last blocks are moved back to end where the arrays end, so that nothing need be
    padded; the overlap with the block before is then not new.
    """

    query: jax.Array  # its first
    source: jax.Array  # its first
    new_source: jax.Array  # its first that is new
    partly: bool  # whether some pair may be masked


class Sources(NamedTuple):
    """Keys and values, with the rows that are not finite replaced."""

    scored: jax.Array  # (S, d_k) keys; NaN where key or value is not finite
    key: jax.Array  # (S, d_k) 0 there
    value: jax.Array  # (S, d_v) 0 there


# --- loops


def over_queries(plan: Plan, function: Callable, carry, length: int):
    """Computes carry = function(carry, rows) for every block of queries.

    Args:
      plan: static.
      function: (carry, Rows) -> carry.
      carry: pytree of arrays.
      length: T.

    Returns:
      The last carry.
    """

    def block(number, carry):
        new = number * plan.rows
        return function(carry, Rows(jnp.minimum(new, length - plan.rows), new))

    return _repeat(0, -(-length // plan.rows), block, carry)


def over_sources(
    plan: Plan, function: Callable, carry, query, sources: int, side: SideInputs
):
    """Computes carry = function(tile, carry) for every tile that is not fully masked.

    Blocks of sources that all queries of the block attend to, from `inner` to `outer`,
    are a loop of their own, without masks: most of the work of a long causal head.

    Args:
      plan: static.
      function: (Tile, carry) -> carry; traced once for each loop.
      carry: pytree of arrays.
      query: the first of the block.
      sources: S.
      side: mask and key_length limit the tiles.

    Returns:
      The last carry.
    """
    blocks = -(-sources // plan.columns)
    limits = (plan.low, plan.high, side.key_length, side.mask)
    partly = sources % plan.columns > 0 or any(x is not None for x in limits)
    fully = side.mask is None and (blocks > 1 or not partly)

    end = sources if side.key_length is None else jnp.minimum(side.key_length, sources)
    begin, inner, outer = 0, 0, end if fully else 0
    if plan.low is not None:
        begin = query + plan.low
        inner = begin + plan.rows - 1
    if plan.high is not None:
        outer = jnp.minimum(query + plan.high + 1, outer)
        end = jnp.minimum(query + plan.rows + plan.high, end)
    begin = jnp.clip(begin // plan.columns, 0, blocks)
    end = jnp.clip(-(-end // plan.columns), begin, blocks)
    inner = jnp.clip(-(-inner // plan.columns), begin, end)
    outer = jnp.clip(outer // plan.columns, inner, end)

    def tile(block, partly):
        new = block * plan.columns
        return Tile(query, jnp.minimum(new, sources - plan.columns), new, partly)

    if fully:
        carry = _repeat(
            inner, outer, lambda block, c: function(tile(block, False), c), carry
        )
    if partly:

        def outside(number, carry):
            block = begin + number
            block += jnp.where(block >= inner, outer - inner, 0)
            return function(tile(block, True), carry)

        carry = _repeat(0, inner - begin + end - outer, outside, carry)
    return carry


def _repeat(begin, end, body: Callable, carry):
    """A loop whose counter has 32 bits, as all positions have, under float64 too."""

    def counted(number, carry):
        return body(number.astype(np.int32), carry)

    return jax.lax.fori_loop(jnp.int32(begin), jnp.int32(end), counted, carry)


# --- scores


def scores(plan: Plan, tile: Tile, query_t, key, bias, side: SideInputs) -> jax.Array:
    """Scores of a tile, transposed (columns, rows); -inf where masked.

    Args:
      plan: static.
      tile: of the scores.
      query_t: q / √d_k of its queries, (d_k, rows).
      key: (S, d_k).
      bias: (1 or T, 1 or S), or None.
      side: mask and key_length.

    Returns:
      s_ij (columns, rows).
    """
    score = dot(plan, cut(key, tile.source, plan.columns), query_t)
    if bias is not None:
        added = cut_tile(plan, bias, tile).astype(score.dtype).T
        score = jnp.where(added == -jnp.inf, -jnp.inf, score + added)
    if not tile.partly:
        return score
    source = (tile.source + count(plan.columns))[:, None]
    query = (tile.query + count(plan.rows))[None]
    allowed = source >= tile.new_source
    if plan.low is not None:
        allowed &= source >= query + plan.low
    if plan.high is not None:
        allowed &= source <= query + plan.high
    if side.key_length is not None:
        allowed &= source < side.key_length
    if side.mask is not None:
        allowed &= cut_tile(plan, side.mask, tile).T
    return jnp.where(allowed, score, -jnp.inf)


def mark_sources(key: jax.Array, value: jax.Array) -> Sources:
    """Replaces sources that are not finite, so that they reach only their own queries.

    0 · NaN is NaN: a product over a tile would spread a NaN of one query's sources over
    all queries of its block.

    Args:
      key: (S, d_k).
      value: (S, d_v).

    Returns:
      Sources.
    """
    sound = (masks.finite_rows(key) & masks.finite_rows(value))[:, None]
    clean = jnp.where(sound, key, 0)
    return Sources(jnp.where(sound, clean, jnp.nan), clean, jnp.where(sound, value, 0))


# --- slices and products


cut = jax.lax.dynamic_slice_in_dim


def put(arrays, blocks, first):
    """Writes blocks of rows into arrays, from row `first` on."""
    return jax.tree.map(
        lambda array, block: jax.lax.dynamic_update_slice_in_dim(
            array, block, first, 0
        ),
        arrays,
        blocks,
    )


def add(array: jax.Array, block: jax.Array, first) -> jax.Array:
    """Adds a block of rows to an array, from row `first` on."""
    return put(array, cut(array, first, len(block)) + block, first)


def cut_tile(plan: Plan, array: jax.Array, tile: Tile) -> jax.Array:
    """The tile of a mask or bias (1 or T, 1 or S): (1 or rows, 1 or columns)."""
    start, size = _corner(plan, array, tile)
    return jax.lax.dynamic_slice(array, start, size)


def add_tile(plan: Plan, array: jax.Array, block: jax.Array, tile: Tile) -> jax.Array:
    """Adds a block (rows, columns) to the gradient of a bias (1 or T, 1 or S)."""
    start, size = _corner(plan, array, tile)
    block = laws.score_bias_gradient(block, size)
    block += jax.lax.dynamic_slice(array, start, size)
    return jax.lax.dynamic_update_slice(array, block, start)


def _corner(plan: Plan, array: jax.Array, tile: Tile):
    """Where a tile of an array begins, and its sizes."""
    full = (tile.query, plan.rows), (tile.source, plan.columns)
    found = [
        (np.int32(0), 1) if size == 1 else part
        for size, part in zip(array.shape, full, strict=True)
    ]
    return zip(*found, strict=True)


def count(size: int) -> np.ndarray:
    """0, 1, ..., size - 1 in the type of positions."""
    return np.arange(size, dtype=np.int32)


def dot(plan: Plan, left: jax.Array, right: jax.Array) -> jax.Array:
    """Matrix product in the precision that was asked for."""
    return jnp.matmul(left, right, precision=plan.precision)


def widen(array: jax.Array) -> jax.Array:
    """Appends columns of zeros up to a multiple of 16, the numbers of one register.

    Measured on x86: products (sources, queries) x (queries, 15) take 1.6 times as long
    as with 16 columns.
    """
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % 16)))


def for_sums(array: jax.Array) -> jax.Array:
    """Converts to the precision of the sums: float32 for half precisions."""
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


def zeros(kind: type, shape, dtype):
    """A NamedTuple of zeros."""
    return kind(*(jnp.zeros(shape, dtype) for _ in kind._fields))
