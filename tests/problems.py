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
    """Params, inputs and targets."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = attention.init_params(
        keys[0],
        d_x=d_x,
        d_k=d_k,
        d_v=d_v,
        num_classes=num_classes,
        scale=scale,
        bias=bias,
        dtype=dtype,
    )
    if bias:
        params = params._replace(b_o=jax.random.normal(keys[1], (num_classes,), dtype))
    inputs = jax.random.normal(keys[2], (length, d_x), dtype)
    targets = jax.random.randint(keys[3], (length,), 0, num_classes)
    return params, inputs, targets


def random_mask(seed, length, *, blind_rows=True):
    """A mask with half the entries allowed and, if wanted, rows that see nothing."""
    mask = np.random.default_rng(seed).random((length, length)) < 0.5
    if blind_rows:
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
