"""Forward pass of one head: contexts by blocks, with running maxima."""

import math

import jax.numpy as jnp

from jaxattn.kernels import dropout, tiles
from jaxattn.kernels.sharding import manual_axes, varying
from jaxattn.kernels.tiles import Plan, SideInputs
from jaxattn.theory.row_blocks import append_one


def one_head(plan: Plan, query, key, value, bias, side: SideInputs):
    """Contexts of one head.

    g_i = Σ_j c_ij e_ij v_j / n_i,  e_ij = exp(s_ij - max s_i),  n_i = Σ_j e_ij

    Args:
      plan: static.
      query: q (T, d_k).
      key: k (S, d_k).
      value: v (S, d_v).
      bias: (1 or T, 1 or S), or None.
      side: mask, key length, dropout.

    Returns:
      Contexts (T, d_v); max s_i (T,), +inf in a fully masked row; n_i (T,), 1 there. In
      the precision of the sums.
    """
    axes = manual_axes(query)
    query = tiles.for_sums(query)
    (length, depth), sources = query.shape, len(key)
    scored, _, value = tiles.mark_sources(tiles.for_sums(key), tiles.for_sums(value))
    query_t = query.T / math.sqrt(depth)
    value_and_one_t = append_one(value).T

    def block(results, rows):
        query_block_t = tiles.cut(query_t, rows.first, plan.rows, axis=1)

        def step(tile, carry):
            largest, summed = carry
            score = tiles.scores(plan, tile, query_block_t, scored, bias, side)
            larger = jnp.maximum(largest, jnp.max(score, axis=0))
            # -inf - (-inf) would be NaN while all sources are masked.
            shift = jnp.where(larger == -jnp.inf, 0, larger)
            exponential = jnp.exp(score - shift[None])
            content_t = tiles.cut(value_and_one_t, tile.source, plan.columns, axis=1)
            if side.dropout is None:
                added = tiles.dot(plan, content_t, exponential)
            else:  # the normaliser is without dropout
                kept = dropout.factors(plan, tile, side.dropout, length, sources)
                added = tiles.dot(plan, content_t, kept * exponential)
                added = added.at[-1].set(jnp.sum(exponential, axis=0))
            return larger, summed * jnp.exp(largest - shift)[None] + added

        carry = (
            jnp.full(plan.rows, -jnp.inf, query.dtype),
            jnp.zeros((len(value_and_one_t), plan.rows), query.dtype),
        )
        largest, summed = tiles.over_sources(
            plan, step, varying(carry, axes), rows.first, sources, side
        )
        fully_masked = largest == -jnp.inf
        normaliser = jnp.where(fully_masked, 1, summed[-1])
        context = (summed[:-1] / normaliser[None]).T
        # A score that overflows leaves +inf too, but makes NaN.
        largest = jnp.where(largest == jnp.inf, jnp.nan, largest)
        largest = jnp.where(fully_masked, jnp.inf, largest)
        # Rows of an earlier block come out as before.
        return tiles.put(results, (context, largest, normaliser), rows.first)

    results = (
        jnp.zeros((length, value.shape[1]), query.dtype),
        jnp.zeros(length, query.dtype),
        jnp.zeros(length, query.dtype),
    )
    return tiles.over_queries(plan, block, varying(results, axes), length)
