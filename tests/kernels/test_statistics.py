"""Taps under jit, vmap, scan and remat; values are compared in test_streaming.py."""

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import relative_error

from jaxattn.kernels import streaming


def pulled(query, key, value, upstream, tap):
    """Gradient of <u, g> for query and tap, causal."""

    def attend(query, tap):
        return streaming.attend(query, key, value, causal=True, tap=tap)

    return jax.vjp(attend, query, tap)[1](upstream)


tapped = jax.jit(pulled)


def test_taps_under_vmap_are_each_example_s_own(x64):
    examples = [dense.heads(seed, 9, 9) for seed in range(2)]
    arrays = [np.stack(pair) for pair in zip(*examples, strict=True)]
    tap = streaming.zero_tap(9, (2,), np.float64)
    stacked = streaming.zero_tap(9, (2, 2), np.float64)
    together = jax.jit(jax.vmap(pulled))(*arrays, stacked)
    apart = [tapped(*example, tap) for example in examples]
    apart = jax.tree.map(lambda *leaves: np.stack(leaves), *apart)
    assert relative_error(together, apart) < 1e-14


def test_a_tap_changes_nothing_else(x64):
    arrays = dense.heads(0, 9, 9)
    tap = streaming.zero_tap(9, (2,), np.float64)
    np.testing.assert_array_equal(tapped(*arrays, tap)[0], tapped(*arrays, None)[0])


def test_taps_under_scan_and_remat_are_each_layer_s_own(x64):
    query, key, value, upstream = dense.heads(0, 9, 9, d_k=3)

    def layer(context, tap):
        return jnp.tanh(streaming.attend(context, key, value, tap=tap)), None

    def total(taps, wrap):
        context, _ = jax.lax.scan(wrap(layer), query, taps)
        return jnp.vdot(upstream, context)

    taps = streaming.zero_tap(9, (3, 2), np.float64)  # three layers, two heads
    scanned = jax.jit(jax.grad(functools.partial(total, wrap=lambda f: f)))(taps)
    again = jax.jit(jax.grad(functools.partial(total, wrap=jax.checkpoint)))(taps)
    assert relative_error(again, scanned) < 1e-14

    def unrolled(taps):
        context = query
        for n in range(3):
            tap = jax.tree.map(lambda leaf, n=n: leaf[n], taps)
            context, _ = layer(context, tap)
        return jnp.vdot(upstream, context)

    assert relative_error(jax.jit(jax.grad(unrolled))(taps), scanned) < 1e-13
    assert len(set(np.asarray(scanned.routing_entropy).ravel().tolist())) == 6


def test_fully_masked_queries_are_counted_whatever_they_are():
    query, key, value, upstream = dense.heads(0, 12, 12, dtype=np.float32)
    tap = streaming.zero_tap(12, (2,))

    @jax.jit
    def fully_masked(query, upstream):
        def attend(tap):
            return streaming.attend(query, key, value, window=(None, -3), tap=tap)

        (statistics,) = jax.vjp(attend, tap)[1](upstream)
        return statistics.fully_masked_rows

    np.testing.assert_array_equal(fully_masked(query, upstream), [3, 3])
    query[1] = np.nan
    np.testing.assert_array_equal(fully_masked(query, upstream), [3, 3])
    upstream[1] = 0  # it is padding
    np.testing.assert_array_equal(fully_masked(query, upstream), [2, 2])


@pytest.mark.parametrize(
    ("tap", "message"),
    [
        (streaming.zero_tap(9), r"tap.*of \(\): must be zero_tap\(9, \(2,\)\)"),
        (streaming.zero_tap(8, (2,)), r"tap.column_usage of \(2, 8\): must be zero"),
        ({}, "tap of dict: must be zero_tap"),
    ],
)
def test_a_tap_of_another_shape(tap, message):
    query = np.zeros((9, 2, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        streaming.attend(query, query, query, tap=tap)


@pytest.mark.parametrize("sizes", [(0, (2,)), (9, (2, 0)), (2.5, ()), (True, ())])
def test_a_tap_of_no_size(sizes):
    with pytest.raises(ValueError, match="must be an integer, at least 1"):
        streaming.zero_tap(*sizes)
