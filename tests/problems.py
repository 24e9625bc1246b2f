"""Random problems for the tests, and what is compared on them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.engine import sweep
from jaxattn.measures import trajectory
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


def result_of(config, curves, maps=None):
    """A finished run of made-up curves, by metric, and attention maps.

    Without a grid all else that is kept is made up too, of `maps` or of none.
    """
    steps = sweep.evaluation_steps(config)
    finite = np.all([np.isfinite(curve) for curve in curves.values()], axis=0)
    since = np.where(finite.all(axis=-1), -1, steps[np.argmin(finite, axis=-1)])
    seeds = np.arange(config.seeds)
    if sweep.points(config) is not None:
        return sweep.Result(steps, sweep.Kept(seeds, curves, since, {}, {}), None)
    rng = np.random.default_rng(1)
    falling = np.linspace(1, 0, len(steps)) * np.ones((*since.shape, 1))
    curves = {n: 0.2 + 0.5 * falling for n in trajectory.CURVES} | curves
    curves |= {"attention_drift": falling}
    traits = {n: rng.uniform(0.3, 0.9, since.shape) for n in trajectory.TRAITS}
    traits |= {n: np.full(since.shape, 0.3) for n in ("bayes_accuracy",)}
    allowed, snapshots = None, {}
    if maps is not None:
        allowed = np.tri(maps.shape[-1], dtype=bool)
        leading, widths = maps.shape[:-1], {"query": 4, "key": 4}
        snapshots = {"attention": maps, "target": rng.integers(0, 8, leading)}
        for name in ("query", "key", "value", "upstream"):
            snapshots[name] = rng.normal(size=(*leading, widths.get(name, 3)))
    kept = sweep.Kept(seeds, curves, since, traits, snapshots)
    return sweep.Result(steps, kept, allowed)
