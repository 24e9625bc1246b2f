"""Statistics of the laws: what a tap returns, and the sums it is made of."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels.tiles import Tile
from jaxattn.theory.sizes import check_size


class LawStatistics(NamedTuple):
    """Statistics of the laws in one call of `attend`, for each head; shape of a tap.

    Entropies and column usage are of a, never of dropped weights; A, ∂L/∂s and ∂L/∂v
    are those of the pass that ran, with its dropout. Losses in nats. A call without a
    head axis has statistics without one. Padding, which is a query that is not finite
    and whose upstream gradient is 0, is left out of all of them.
    """

    routing_entropy: jax.Array  # (H,) Σ_i H_i, nats
    relative_entropy: jax.Array  # (H,) mean H_i / log n_i, n_i ≥ 2 unmasked sources
    routing_pressure: jax.Array  # (H,) Σ_ij a_ij A_ij²
    score_gradient_norm: jax.Array  # (H,) ‖∂L/∂s‖
    largest_advantage: jax.Array  # (H,) max |A_ij| over unmasked pairs
    column_usage: jax.Array  # (H, S) N_j = Σ_i a_ij
    value_gradient_norm: jax.Array  # (H,) ‖∂L/∂v‖, the head's own share
    fully_masked_rows: jax.Array  # (H,) number of queries without a source


class RowSums(NamedTuple):
    """Sums over the sources, of each query of a block, (rows,)."""

    exponent: jax.Array  # Σ_j e_ij log e_ij, at most 0
    pressure: jax.Array  # Σ_j a_ij A_ij² / n_i
    squares: jax.Array  # Σ_j (∂L/∂s_ij)²
    advantage: jax.Array  # max_j |A_ij| / n_i
    unmasked: jax.Array  # number of sources


class Totals(NamedTuple):
    """Row sums, added up over the queries."""

    entropy: jax.Array
    relative_entropy: jax.Array
    with_choice: jax.Array  # queries with two unmasked sources or more
    pressure: jax.Array
    squares: jax.Array
    advantage: jax.Array  # the largest
    fully_masked: jax.Array


def zero_tap(
    num_sources: int, leading: tuple[int, ...] = (), dtype=jnp.float32
) -> LawStatistics:
    """A tap to hand to `attend`; its gradient is the statistics.

    Args:
      num_sources: S.
      leading: (H,); () for a call without a head axis; before them, axes for `vmap`.
      dtype: of the statistics.

    Returns:
      LawStatistics of zeros, (*leading,), the column usage (*leading, S).

    Raises:
      ValueError: a size is not an integer of at least 1.
    """
    check_size("num_sources", num_sources)
    for size in leading:
        check_size(f"a size of leading {leading}", size)
    scalar = jnp.zeros(leading, dtype)
    usage = jnp.zeros((*leading, num_sources), dtype)
    names = LawStatistics._fields
    return LawStatistics(*(usage if n == "column_usage" else scalar for n in names))


def check_tap(tap, leading: tuple[int, ...], sources: int) -> None:
    """Checks that a tap has the shapes of `zero_tap(sources, leading)`.

    Args:
      tap: to check; None is none.
      leading: as in `zero_tap`.
      sources: S.

    Raises:
      ValueError: it has others.
    """
    if tap is None:
        return
    must = f"must be zero_tap({sources}, {leading})"
    if not isinstance(tap, LawStatistics):
        raise ValueError(f"tap of {type(tap).__name__}: {must}")
    for name, leaf in tap._asdict().items():
        shape = (*leading, sources) if name == "column_usage" else leading
        if jnp.shape(leaf) != shape:
            raise ValueError(f"tap.{name} of {jnp.shape(leaf)}: {must}")


def add_to_rows(
    sums: RowSums, tile: Tile, bias, shifted, exponential, centred, score_gradient
) -> RowSums:
    """Adds a tile to the sums of its queries.

    Args:
      sums: so far.
      tile: to add; all arrays below are of it, (columns, rows).
      bias: of the head, or None: then only `tile.partly` tells of masked pairs.
      shifted: s_ij - max_i, -inf where masked.
      exponential: exp(shifted).
      centred: -A_ij / n_i.
      score_gradient: ∂L/∂s_ij.

    Returns:
      RowSums.
    """
    advantage = jnp.abs(centred)
    unmasked = jnp.full(len(sums.unmasked), len(shifted), shifted.dtype)
    if tile.partly or bias is not None:
        allowed = shifted != -jnp.inf  # a NaN is allowed, so that it shows
        shifted = jnp.where(allowed, shifted, 0)
        advantage = jnp.where(allowed, advantage, 0)
        unmasked = jnp.sum(allowed, axis=0, dtype=shifted.dtype)
    return RowSums(
        exponent=sums.exponent + jnp.sum(exponential * shifted, axis=0),
        pressure=sums.pressure + jnp.sum(score_gradient * centred, axis=0),
        squares=sums.squares + jnp.sum(score_gradient**2, axis=0),
        advantage=jnp.maximum(sums.advantage, jnp.max(advantage, axis=0)),
        unmasked=sums.unmasked + unmasked,
    )


def add_to_totals(totals: Totals, sums: RowSums, normaliser, counts) -> Totals:
    """Adds the queries of a block.

    Args:
      totals: so far.
      sums: of the queries of the block.
      normaliser: n_i (rows,).
      counts: boolean (rows,), False for a query of an earlier block, or of padding.

    Returns:
      Totals.
    """
    sums = jax.tree.map(lambda row: jnp.where(counts, row, 0), sums)
    normaliser = jnp.where(counts, normaliser, 1)
    entropy = jnp.log(normaliser) - sums.exponent / normaliser
    choice = sums.unmasked > 1
    relative = entropy / jnp.log(jnp.where(choice, sums.unmasked, 2))
    fully_masked = counts & (sums.unmasked == 0)
    dtype = entropy.dtype
    return Totals(
        entropy=totals.entropy + jnp.sum(entropy),
        relative_entropy=totals.relative_entropy + jnp.sum(relative, where=choice),
        with_choice=totals.with_choice + jnp.sum(choice, dtype=dtype),
        pressure=totals.pressure + jnp.sum(normaliser * sums.pressure),
        squares=totals.squares + jnp.sum(sums.squares),
        advantage=jnp.maximum(totals.advantage, jnp.max(normaliser * sums.advantage)),
        fully_masked=totals.fully_masked + jnp.sum(fully_masked, dtype=dtype),
    )


def of_head(
    totals: Totals, usage: jax.Array, value_gradient: jax.Array, tap: LawStatistics
) -> LawStatistics:
    """Statistics of a head, in the dtypes of its tap.

    Args:
      totals: over all queries.
      usage: N_j (S,).
      value_gradient: ∂L/∂v (S, d_v).
      tap: for its dtypes.

    Returns:
      LawStatistics.
    """
    statistics = LawStatistics(
        routing_entropy=totals.entropy,
        relative_entropy=totals.relative_entropy / jnp.maximum(totals.with_choice, 1),
        routing_pressure=totals.pressure,
        score_gradient_norm=jnp.sqrt(totals.squares),
        largest_advantage=totals.advantage,
        column_usage=usage,
        value_gradient_norm=jnp.sqrt(jnp.sum(value_gradient**2)),
        fully_masked_rows=totals.fully_masked,
    )
    return jax.tree.map(lambda s, t: s.astype(t.dtype), statistics, tap)
