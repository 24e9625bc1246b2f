"""Loops over tiles: each unmasked pair once, and fully masked tiles never."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels import tiles


def visits(length, sources, rows, columns, low, high) -> np.ndarray:
    """How often each pair is worked on: (T, S)."""
    plan = tiles.Plan(rows, columns, low, high, 0.0, None)
    side = tiles.SideInputs(None, None, None)

    def step(tile, counts):
        start = tile.query, tile.source
        patch = jax.lax.dynamic_slice(counts, start, (rows, columns))
        return jax.lax.dynamic_update_slice(counts, patch + 1, start)

    def block(counts, queries):
        return tiles.over_sources(plan, step, counts, queries.first, sources, side)

    counts = jnp.zeros((length, sources), np.int32)
    run = jax.jit(lambda counts: tiles.over_queries(plan, block, counts, length))
    return np.asarray(run(counts))


@pytest.mark.parametrize("low", [None, -8])
def test_only_tiles_of_the_band_are_worked_on(low):
    found = visits(64, 64, 8, 8, low, 0)
    band = np.tri(8) if low is None else np.tri(8) - np.tri(8, k=-2)
    np.testing.assert_array_equal(found, np.kron(band, np.ones((8, 8))))


def test_every_pair_is_worked_on_where_blocks_do_not_fit():
    assert (visits(13, 11, 4, 3, None, None) >= 1).all()
