"""Backward pass of one head: the advantage law by blocks, and its statistics."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels import dropout, statistics, tiles
from jaxattn.kernels.sharding import manual_axes, varying
from jaxattn.kernels.statistics import LawStatistics
from jaxattn.kernels.tiles import Plan, SideInputs
from jaxattn.theory.masks import finite_rows


class Requested(NamedTuple):
    """Gradients that are needed beside those of query, key, value; None: not needed."""

    bias: jax.Array | None  # of the bias; the number means nothing
    tap: LawStatistics | None  # the statistics, in these dtypes


class Sums(NamedTuple):
    """Sums over all queries; None: not needed."""

    key: jax.Array  # (S, d_k)
    value: jax.Array  # (S, d_v)
    bias: jax.Array | None  # (1 or T, 1 or S)
    usage: jax.Array | None  # (S,)


def one_head(
    plan: Plan,
    query,
    key,
    value,
    bias,
    side: SideInputs,
    context,
    largest,
    normaliser,
    upstream,
    requested: Requested,
):
    """Gradients of query, key, value and bias of one head, and its statistics.

    ∂L/∂s_ij = e_ij (c_ij u_i·v_j - u_i·g_i) / n_i

    With a_ij = e_ij / n_i the signals u_i and u_i·g_i are divided by n_i once, and the
    exponentials e never. (One number, log n_i + max s_i, would do for both, but not
    where a bias of -1e9 on a whole row absorbs log n_i.)

    Args:
      plan: static.
      query: q (T, d_k).
      key: k (S, d_k).
      value: v (S, d_v).
      bias: (1 or T, 1 or S), or None.
      side: mask, key length, dropout.
      context: g (T, d_v), from `forward.one_head`, as the next two.
      largest: max s_i (T,).
      normaliser: n_i (T,).
      upstream: u (T, d_v).
      requested: what to return beside the first three.

    Returns:
      The five; None where not requested.
    """
    dtype, axes = context.dtype, manual_axes(query)
    query, upstream = tiles.for_sums(query), tiles.for_sums(upstream)
    (length, depth), sources = query.shape, len(key)
    scored, key, value = tiles.mark_sources(tiles.for_sums(key), tiles.for_sums(value))
    sound = finite_rows(query) & finite_rows(context) & finite_rows(upstream)
    # Of the rows that are not sound: those without a gradient, and the others, which
    # make NaN of the gradients of their sources.
    padding = ~sound & jnp.all(upstream == 0, axis=1)
    silent = padding | (~sound & (largest == jnp.inf))
    mark = jnp.where(sound | silent, 0, jnp.nan)[:, None]
    query, upstream, context = (
        jnp.where(sound[:, None], array, 0) for array in (query, upstream, context)
    )
    largest = jnp.where(silent, jnp.inf, largest)
    normaliser = jnp.where(sound, normaliser, 1)

    scale = 1 / math.sqrt(depth)
    query, upstream = query * scale, upstream / normaliser[:, None]
    query_t, key_t, upstream_t = (query + mark).T, key.T, upstream.T
    wide_query, wide_upstream = tiles.widen(query), tiles.widen(upstream)
    expected = jnp.sum(upstream * context, axis=1)  # E_i[b] / n_i = u_i·g_i / n_i
    tapped = requested.tap is not None

    def block(carry, rows):
        query_gradient, sums, totals = carry
        query_block = tiles.cut(wide_query, rows.first, plan.rows)
        query_block_t = tiles.cut(query_t, rows.first, plan.rows, axis=1)
        upstream_block = tiles.cut(wide_upstream, rows.first, plan.rows)
        upstream_block_t = tiles.cut(upstream_t, rows.first, plan.rows, axis=1)
        mean = tiles.cut(expected, rows.first, plan.rows)[None]
        is_new = rows.first + tiles.count(plan.rows) >= rows.new
        # exp(s - inf) = 0: rows that are not new, or fully masked, have no weight.
        shift = tiles.cut(largest, rows.first, plan.rows)
        shift = jnp.where(is_new, shift, jnp.inf)[None]
        normal = tiles.cut(normaliser, rows.first, plan.rows)
        counts = is_new & ~tiles.cut(padding, rows.first, plan.rows)

        def step(tile, carry):
            query_gradient_t, sums, row_sums = carry
            score = tiles.scores(plan, tile, query_block_t, scored, bias, side)
            # exp(score - shift) is NaN for a NaN less inf, and for -inf less NaN.
            masked = shift == jnp.inf
            if tile.partly or bias is not None:
                masked |= score == -jnp.inf
            exponential = jnp.where(masked, 0, jnp.exp(score - shift))
            value_block = tiles.cut(value, tile.source, plan.columns)
            compatibility = tiles.dot(plan, value_block, upstream_block_t)
            dropped = exponential
            if side.dropout is not None:
                kept = dropout.factors(plan, tile, side.dropout, length, sources)
                compatibility, dropped = kept * compatibility, kept * exponential
            centred = compatibility - mean  # -A_ij / n_i
            score_gradient = exponential * centred
            key_block_t = tiles.cut(key_t, tile.source, plan.columns, axis=1)
            query_gradient_t += tiles.dot(plan, key_block_t, score_gradient)
            of_key = tiles.dot(plan, score_gradient, query_block)
            sums = sums._replace(key=tiles.add(sums.key, of_key, tile.source))
            of_value = tiles.dot(plan, dropped, upstream_block)
            sums = sums._replace(value=tiles.add(sums.value, of_value, tile.source))
            if requested.bias is not None:
                of_bias = tiles.add_tile(plan, sums.bias, score_gradient.T, tile)
                sums = sums._replace(bias=of_bias)
            if tapped:
                usage = jnp.matmul(exponential, 1 / normal, precision="highest")
                sums = sums._replace(usage=tiles.add(sums.usage, usage, tile.source))
                shifted = score - shift
                row_sums = statistics.add_to_rows(
                    row_sums, tile, bias, shifted, exponential, centred, score_gradient
                )
            return query_gradient_t, sums, row_sums

        carry = (
            jnp.zeros((depth, plan.rows), dtype),
            sums,
            tiles.zeros(statistics.RowSums, plan.rows, dtype) if tapped else None,
        )
        query_gradient_t, sums, row_sums = tiles.over_sources(
            plan, step, varying(carry, axes), rows.first, sources, side
        )
        query_gradient = tiles.add(query_gradient, query_gradient_t.T, rows.first)
        if tapped:
            totals = statistics.add_to_totals(totals, row_sums, normal, counts)
        return query_gradient, sums, totals

    carry = (
        jnp.zeros_like(query),
        Sums(
            key=jnp.zeros((sources, wide_query.shape[1]), dtype),
            value=jnp.zeros((sources, wide_upstream.shape[1]), dtype),
            bias=None if requested.bias is None else jnp.zeros(bias.shape, dtype),
            usage=jnp.zeros(sources, dtype) if tapped else None,
        ),
        tiles.zeros(statistics.Totals, (), dtype) if tapped else None,
    )
    query_gradient, sums, totals = tiles.over_queries(
        plan, block, varying(carry, axes), length
    )
    tap = None
    if tapped:
        tap = statistics.of_head(totals, sums.usage, sums.value, requested.tap)
    key_gradient, value_gradient = sums.key[:, :depth], sums.value[:, : value.shape[1]]
    return query_gradient * scale, key_gradient, value_gradient, sums.bias, tap
