"""Layers by themselves: rotary positions, and a history of vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.models import layers

rotate = jax.jit(layers.rotate)


def test_a_history_is_the_past_and_no_more():
    x = np.arange(1.0, 5)[:, None].astype(np.float32)
    found = np.asarray(layers.history(x, 3))
    np.testing.assert_array_equal(found, [[1, 0, 0], [2, 1, 0], [3, 2, 1], [4, 3, 2]])


def test_rotated_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(2, 1, 1, 6)).astype(np.float32)
    q, k = (np.asarray(rotate(np.tile(x, (12, 1, 1))))[:, 0] for x in vectors)
    product = q @ k.T
    for distance in range(-5, 6):
        along = np.diagonal(product, distance)
        np.testing.assert_allclose(along, along[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(product[0]) > 0.1
    norm = np.linalg.norm(vectors[0])
    np.testing.assert_allclose(np.linalg.norm(q, axis=1), norm, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_angles_are_not_in_half_precision(dtype):
    rotated = rotate(np.ones((70_000, 1, 50), dtype))
    assert rotated.dtype == dtype
    rotated = np.asarray(rotated).astype(np.float64)
    product = np.sum(rotated[1:] * rotated[:-1], axis=(1, 2))
    rate = 10_000.0 ** (-np.arange(0, 50, 2) / 50)
    rounding = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(product, 2 * np.cos(rate).sum(), rtol=0.01 + rounding)
