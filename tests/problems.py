"""Random problems for the tests, and what is compared on them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.theory import attention


def random_problem(
    seed,
    *,
    length=12,
    d_x=5,
    d_k=4,
    d_v=3,
    num_classes=6,
    scale=1.0,
    bias=True,
    dtype=np.float64,
):
    """Params, inputs and targets; drawn by NumPy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    params = attention.Params(
        normal(d_x, d_k, scale=scale),
        normal(d_x, d_k, scale=scale),
        normal(d_x, d_v, scale=scale),
        normal(d_v, num_classes, scale=scale),
        normal(num_classes) if bias else None,
    )
    inputs = normal(length, d_x)
    return params, inputs, jnp.asarray(rng.integers(0, num_classes, length))


def random_mask(seed, length):
    """A mask with half the entries allowed, and a few fully masked rows."""
    mask = np.random.default_rng(seed).random((length, length)) < 0.5
    mask[:: max(length // 3, 1)] = False
    return mask


def relative_error(actual, expected) -> float:
    """Norm of the difference over the norm, of whole pytrees."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(e, np.float64)) for a, e in pairs]
    difference = sum(np.sum((a - e) ** 2) for a, e in pairs)
    return float(np.sqrt(difference / sum(np.sum(e**2) for _, e in pairs)))


def central_difference(function, point, direction, step=1e-5) -> float:
    """Slope of a scalar function of a pytree along a direction."""

    def moved(size):
        return function(jax.tree.map(lambda p, d: p + size * d, point, direction))

    return float(moved(step) - moved(-step)) / (2 * step)


def random_direction(seed, tree):
    """A pytree of independent N(0, 1)."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), tree)
