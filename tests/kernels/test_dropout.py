"""Dropout of weights; equality with `jax.random.bernoulli`: see test_streaming.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from jaxattn.kernels import dropout, streaming

ARRAYS = [np.zeros((9, 2, 4), np.float32)] * 3


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "raw"])
def test_dropout_takes_any_key(kind):
    key = jax.random.PRNGKey(0) if kind == "raw" else jax.random.key(0, impl=kind)
    # Attention is uniform: contexts are means of c_ij.
    query, source = np.zeros((40, 2, 4), np.float32), np.zeros((50, 2, 4), np.float32)
    value = np.ones((50, 2, 1), np.float32)
    context = streaming.attend(query, source, value, dropout_rate=0.25, dropout_key=key)
    kept = 0.75 * np.asarray(context) * 50
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    # 4000 draws, standard deviation of their share 0.0068.
    assert abs(kept.sum() / 4000 - 0.75) < 4 * 0.0068
    assert not np.array_equal(kept[:, 0], kept[:, 1])


def test_products_have_64_bits():
    words = np.uint64(70_001) * np.uint64(2**20 - 3)
    high, low = dropout.multiply(jnp.full(1, 70_001, np.uint32), 2**20 - 3)
    assert (int(high[0]) << 32) + int(low[0]) == int(words)


def test_slots_of_dropout_never_repeat():
    """Where slot times T passes 2^32 the mask goes on as that of a larger array."""
    length, sources, rate = 16, 9, 0.5
    slots = [0, 2**28, 2**32 - 1, 3 * 2**28]
    key = jax.random.key(3)
    eye = np.eye(sources, dtype=np.float32)
    contexts = streaming.attend(
        np.zeros((length, 4, 2), np.float32),
        np.zeros((sources, 4, 2), np.float32),
        np.broadcast_to(eye[:, None], (sources, 4, sources)),
        dropout_rate=rate,
        dropout_key=key,
        dropout_slot=np.array(slots),
    )
    words = np.asarray(jax.random.key_data(key))
    for head, slot in enumerate(slots):
        first = slot * length * sources
        places = [(first + n) % 2**64 for n in range(length * sources)]
        high = np.array([place >> 32 for place in places], np.uint32)
        low = np.array([place & 0xFFFFFFFF for place in places], np.uint32)
        full = [np.full(len(places), word) for word in words]
        bits = np.bitwise_xor(*map(np.asarray, threefry2x32_p.bind(*full, high, low)))
        kept = (bits >> 9) * 2.0**-23 < 1 - rate
        np.testing.assert_array_equal(
            np.asarray(contexts)[:, head] > 0, kept.reshape(length, sources)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": 1.0}, "dropout_rate=1.0: must be a number from 0, below 1"),
        ({"dropout_rate": 0.5}, "dropout_key=None: must be a random key, as dropout"),
        (
            {
                "dropout_rate": 0.5,
                "dropout_key": jax.random.key(0),
                "dropout_slot": np.array([0, 2**32]),
            },
            "dropout_slot=.*: must be integers from 0, below",
        ),
        (
            {
                "dropout_rate": 0.5,
                "dropout_key": jax.random.key(0),
                "dropout_slot": np.array([0, 1, 2]),
            },
            r"dropout_slot \(3,\): must be \(2,\)",
        ),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        streaming.attend(*ARRAYS, **options)
