"""Numbers that may not be valid, and which differences are rounding."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Measurement(NamedTuple):
    """Numbers, and which of them are defined; the others are 0."""

    value: jax.Array
    valid: jax.Array  # boolean, of the same shape


def rounding(numbers: jax.Array) -> jax.Array:
    """Largest difference that may be rounding: 8 ε max |x|, ε of the dtype.

    Args:
      numbers: of any shape; those that are not finite are left out.
    """
    size = jnp.max(jnp.abs(jnp.where(jnp.isfinite(numbers), numbers, 0)))
    return 8 * jnp.finfo(numbers.dtype).eps * size


def differ(points: jax.Array, of: jax.Array | None = None) -> jax.Array:
    """Whether points have any extent beyond rounding.

    max_c (max_i x_ic - min_i x_ic) > 8 ε max |x|

    Args:
      points: x (n, ...).
      of: what they are differences of, which sets the rounding; None: the points.

    Returns:
      Boolean; True if a number is not finite, so that it is not hidden.
    """
    extent = jnp.max(jnp.max(points, axis=0) - jnp.min(points, axis=0))
    alike = extent <= rounding(points if of is None else of)
    return ~(alike & jnp.isfinite(points).all())


def centred(points: jax.Array) -> jax.Array:
    """Points (n, d) about their mean, all 0 if they do not `differ`.

    Relative to the first point, so that far from the origin the rounding of the mean
    is no direction either.
    """
    chex.assert_rank(points, 2)
    moved = points - points[0][None]
    about = moved - jnp.mean(moved, axis=0)[None]
    return jnp.where(differ(points), about, 0)


def mean(measurement: Measurement) -> Measurement:
    """Averages the valid numbers; valid if any is."""
    count = jnp.sum(measurement.valid)
    total = jnp.sum(jnp.where(measurement.valid, measurement.value, 0))
    return divided(total, count.astype(total.dtype))


def divided(above: jax.Array, below: jax.Array) -> Measurement:
    """Divides, valid where the divisor is above 0.

    Args:
      above: of any sign.
      below: 0 or more, of a shape that broadcasts with that of `above`.
    """
    valid = jnp.broadcast_to(below > 0, jnp.broadcast_shapes(above.shape, below.shape))
    return Measurement(
        jnp.where(valid, above / jnp.where(below > 0, below, 1), 0), valid
    )


def at_most_one(shares: Measurement | jax.Array) -> Measurement | jax.Array:
    """Removes what rounding adds to shares and cosines of 1; derivatives stay."""

    def bounded(share: jax.Array) -> jax.Array:
        above = jax.lax.stop_gradient(jnp.maximum(jnp.abs(share) - 1, 0))
        return share - jnp.sign(share) * above

    if isinstance(shares, Measurement):
        return Measurement(bounded(shares.value), shares.valid)
    return bounded(shares)


def norm(vector: jax.Array) -> jax.Array:
    """Lengths along the last axis, whose gradient at 0 is 0."""
    square = jnp.sum(vector**2, axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
