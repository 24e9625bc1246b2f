"""Fully masked queries, masked sources and padding, in both passes of a head."""

import functools

import dense
import jax
import numpy as np
import pytest

from jaxattn.kernels import streaming


def compiled_pull(**options):
    """Contexts and gradients of `attend` with these options, compiled."""
    attend = functools.partial(streaming.attend, **options)
    return jax.jit(functools.partial(dense.pulled, attend))


@pytest.fixture(scope="module")
def pull_of_masked():
    """Contexts and gradients, compiled once for any mask, bias and key length."""

    @jax.jit
    def run(arrays, mask, bias, key_length):
        attend = functools.partial(
            streaming.attend,
            causal=True,
            block_size=4,
            mask=mask,
            bias=bias,
            key_length=key_length,
        )
        return dense.pulled(attend, *arrays)

    return run


@pytest.mark.parametrize("how", ["mask", "bias", "key_length", "window"])
def test_a_fully_masked_query_has_no_context_and_no_gradient(x64, pull_of_masked, how):
    arrays = dense.heads(0, 12, 10)
    masked = np.zeros(12, bool)
    masked[[0, 1]] = True  # those that causal alone masks: T is larger than S
    mask, bias, key_length = np.ones((12, 1), bool), np.zeros((12, 1)), 10
    if how == "mask":
        masked[5] = True
        mask[5] = False
    elif how == "bias":
        masked[7] = True
        bias[7] = -np.inf
    elif how == "key_length":
        masked[:] = True
        key_length = 0
    if how == "window":
        masked[:4] = True
        run = compiled_pull(causal=True, block_size=4, window=(None, -2))
        context, found = run(*arrays)
    else:
        context, found = pull_of_masked(arrays, mask, bias, key_length)
    assert (np.all(context == 0, axis=(1, 2)) == masked).all()
    assert all(np.isfinite(array).all() for array in found)
    assert (np.all(found[0] == 0, axis=(1, 2))[masked]).all()


# --- numbers that are not finite

IS_USED = np.arange(40) < 30
RULED_OUT = np.where(IS_USED, 0, -np.inf).astype(np.float32)
UNUSED = {  # options that mask the last 10 of 40 sources
    "key_length": {"key_length": 30},
    "mask": {"mask": IS_USED},
    "bias": {"bias": RULED_OUT},
    "window": {"window": (None, -11)},
}


def pull_with_tap(**options):
    """Contexts and gradients, that of a tap among them."""

    def run(query, key, value, upstream):
        def attend(query, key, value, tap):
            return streaming.attend(query, key, value, tap=tap, **options)

        tap = streaming.zero_tap(len(key), (query.shape[1],))
        context, pull = jax.vjp(attend, query, key, value, tap)
        return context, pull(upstream)

    return run


def assert_unused_are_not_read(run):
    query, key, value, upstream = dense.heads(0, 40, 40, dtype=np.float32)
    wanted = jax.tree.leaves(run(query, key, value, upstream))
    for number in (np.nan, np.inf):
        # Copies: a program that still runs may read the arrays that it was given.
        spoilt_key, spoilt_value = key.copy(), value.copy()
        spoilt_key[30:], spoilt_value[31:] = number, number
        found = jax.tree.leaves(run(query, spoilt_key, spoilt_value, upstream))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("how", "block_size"),
    [("key_length", 16), ("bias", 16), ("window", 16)]
    + [
        pytest.param(how, size, marks=pytest.mark.slow)
        for how in UNUSED
        for size in (None, (8, 32))
    ],
)
def test_masked_sources_are_never_read(how, block_size):
    run = pull_with_tap(**UNUSED[how], block_size=block_size)
    assert_unused_are_not_read(jax.jit(run))


def test_masked_sources_are_never_read_with_all_options_at_once():
    @jax.jit
    def run(arrays, mask, bias, key_length):
        pull = pull_with_tap(
            mask=mask, bias=bias, key_length=key_length, block_size=(8, 32)
        )
        return pull(*arrays)

    none = {
        "mask": np.ones(40, bool),
        "bias": np.zeros(40, np.float32),
        "key_length": 40,
    }
    for how in ("mask", "bias", "key_length"):
        options = none | UNUSED[how]
        assert_unused_are_not_read(lambda *arrays, o=options: run(arrays, **o))


@pytest.mark.parametrize("block_size", [16, None])
def test_a_query_depends_on_its_unmasked_sources_alone(block_size):
    query, key, value, upstream = dense.heads(0, 40, 40, dtype=np.float32)
    upstream[30:] = 0  # the loss does not read these contexts
    run = compiled_pull(causal=True, block_size=block_size)
    wanted, wanted_gradient = run(query, key, value, upstream)
    spoilt_key, spoilt_value, padded = key.copy(), value.copy(), query.copy()
    spoilt_key[35, 0], spoilt_value[30, 0], padded[33:] = np.nan, np.inf, np.nan
    context, gradient = map(
        jax.tree.map, (np.asarray,) * 2, run(query, spoilt_key, spoilt_value, upstream)
    )
    np.testing.assert_array_equal(context[:30], wanted[:30])
    np.testing.assert_array_equal(context[:, 1], wanted[:, 1])  # the other head
    assert np.isnan(context[30:, 0]).all()
    # Nor do queries without an upstream gradient spoil the gradients of others.
    for found in (
        gradient,
        run(padded, key, value, upstream)[1],
        run(padded, spoilt_key, spoilt_value, upstream)[1],
    ):
        for one, other in zip(found, wanted_gradient, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "block_size", [5, None, pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_nan_shows_in_the_gradients_that_it_touches(block_size):
    query, key, value, upstream = dense.heads(0, 12, 12, dtype=np.float32)
    bias, tap = np.zeros((12, 12), np.float32), streaming.zero_tap(12, (2,))
    options = {"causal": True, "block_size": block_size}

    @jax.jit
    def run(query, upstream, bias):
        def attend(query, key, value, bias, tap):
            return streaming.attend(query, key, value, bias=bias, tap=tap, **options)

        return jax.vjp(attend, query, key, value, bias, tap)[1](upstream)

    is_query, is_source = np.arange(12) == 5, np.arange(12) <= 5
    for spoilt in range(3):
        arrays = [array.copy() for array in (query, upstream, bias)]
        arrays[spoilt][(5, 2) if spoilt == 2 else 5] = np.nan
        *gradients, of_bias, statistics = run(*arrays)
        touched = is_query, is_source, is_source
        for gradient, where in zip(gradients, touched, strict=True):
            found = np.isnan(gradient).any(axis=(1, 2))
            np.testing.assert_array_equal(found, where, err_msg=str(spoilt))
        where = is_query[:, None] & is_source
        np.testing.assert_array_equal(np.isnan(of_bias), where)
        usage = np.isnan(statistics.column_usage).any(axis=0)
        np.testing.assert_array_equal(usage, is_source)
