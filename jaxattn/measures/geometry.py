"""Measures of the geometry of attention, each beside its nulls.

They quantify claims that arXiv 2512.22471 makes from pictures: an axis of posterior
entropy, beliefs that a linear map can read out, orthogonal keys. A number means
something only beside the same number where there is nothing to find. As in
`diagnostics`, what is undefined is not `valid`; but inputs that are not finite, such as
a posterior from impossible evidence, give NaN.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.measures import diagnostics
from jaxattn.measures.diagnostics import Measurement
from jaxattn.theory import m_steps

# In full precision, not the default of accelerators: ties would break.
_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class EntropyAxis(NamedTuple):
    """Correlation of the main axis of points with posterior entropy; |ρ| is Spearman's.

    The paper's claim needs `found` well above both nulls.
    """

    found: Measurement  # |ρ| of the scores on the first principal axis
    random_direction: Measurement  # mean |ρ| of the scores on random directions
    permuted: Measurement  # mean |ρ| of the same scores with permuted entropies
    one_axis: Measurement  # share of the variance along the first principal axis
    two_axes: Measurement  # and along the first two


class ReadOut(NamedTuple):
    """How well a linear map reads beliefs from features, on held-out rows."""

    found: Measurement  # R², at most 1
    permuted: Measurement  # R² of a map fitted to permuted beliefs: about 0, or below


class KeyAxes(NamedTuple):
    """Mean |cos| between keys; 0 is orthogonal."""

    found: Measurement
    random_keys: Measurement  # of as many Gaussian keys of the same width
    shuffled: Measurement  # of these keys, each coordinate permuted by itself


def rank_correlation(x: jax.Array, y: jax.Array) -> Measurement:
    """Spearman's rank correlation.

    ρ = Σ_i r_i s_i / √(Σ r² Σ s²), r and s the centred ranks, ties at their mean rank

    Args:
      x: (n,), floating; infinities are the extremes.
      y: (n,).

    Returns:
      From -1 to 1; not valid if x or y is constant but for rounding (see
      `diagnostics.differ`), NaN if either has a NaN.
    """
    chex.assert_rank([x, y], 1)
    chex.assert_equal_shape([x, y])
    x_rank, y_rank = (
        jnp.where(diagnostics.differ(these), _ranks(these, 0), 0) for these in (x, y)
    )
    answer = _correlation(x_rank, y_rank)
    return _broken_if(jnp.isnan(x).any() | jnp.isnan(y).any(), answer)


def entropy_axis(
    points: jax.Array,
    entropy: jax.Array,
    key: jax.Array,
    *,
    draws: int,
    block: int,
) -> EntropyAxis:
    """Measures whether points lie along one axis, ordered by posterior entropy.

    |ρ(z, H)|, z_i = (x_i - x̄) · e, e the first principal axis of the points

    Nulls, each a mean over draws of |ρ|, which is never below 0: random directions e
    give what any axis of these points would (as much as the first one, if they lie on a
    line); permuted H gives what chance does. With blocks of whole sequences the
    permuted entropies are those of another sequence at the same position: the null then
    includes what depends on position, as entropy often does, and equals the measure
    where entropy is a function of position alone.

    Entropies that differ by at most 64 eps of the largest count as tied; so do scores,
    relative to the farthest point, or to the rounding of the points if they are far
    from 0. The unit of the points does not matter.

    Args:
      points: x (n, d), such as values or contexts, a row for each position.
      entropy: H (n,) of the exact posterior at each, in any unit.
      key: of the draws.
      draws: how many of either null, 1 or more.
      block: number of consecutive rows that are permuted as one; divides n.

    Returns:
      EntropyAxis; not valid where all points, or all entropies, are equal but for
      rounding.

    Raises:
      ValueError: fewer than 1 draw.

    Source: arXiv 2512.22471, the value manifold parameterised by posterior entropy.
    """
    chex.assert_rank([points, entropy], [2, 1])
    chex.assert_shape(entropy, points.shape[:1])
    _check_draws(draws)
    everyone = jnp.ones(entropy.shape, points.dtype)
    centred, known_to = _centred(points, everyone, 0)
    variance, axes = m_steps.eigh(_product(centred.T, centred) / len(points))
    of_direction, of_order = jax.random.split(key)
    shape = (draws, points.shape[1])
    direction = jax.random.normal(of_direction, shape, points.dtype)
    direction = jnp.concatenate([axes[:, -1][None], direction])
    # All in one batch: the first axis, random ones, and last the entropies.
    rows = jnp.concatenate([_product(direction, centred.T), entropy[None]])
    longest = jnp.sqrt(jnp.max(jnp.sum(centred**2, axis=1)))
    eps = 64 * jnp.finfo(points.dtype).eps
    of_score = jnp.maximum(eps * longest, known_to)
    of_score = of_score * jnp.sqrt(jnp.sum(direction**2, axis=1))
    of_entropy = eps * jnp.max(jnp.abs(entropy))
    rounding = jnp.concatenate([of_score, of_entropy[None]])
    rank = jax.lax.map(lambda row: _ranks(*row), (rows, rounding))
    along = _sizes(rank[:-1], rank[-1])
    blocks = rank[-1].reshape(-1, block)
    chance = jax.random.bits(of_order, (draws, len(blocks)), jnp.uint32)
    shuffled = blocks[jnp.argsort(chance, axis=1)].reshape(draws, -1)
    variance = jnp.maximum(variance, 0)
    answers = EntropyAxis(
        jax.tree.map(lambda leaf: leaf[0], along),
        diagnostics.mean(jax.tree.map(lambda leaf: leaf[1:], along)),
        diagnostics.mean(_sizes(shuffled, rank[0])),
        _share(variance[-1], jnp.sum(variance)),
        _share(jnp.sum(variance[-2:]), jnp.sum(variance)),
    )
    broken = ~(jnp.isfinite(points).all() & jnp.isfinite(entropy).all())
    return EntropyAxis(*(_broken_if(broken, answer) for answer in answers))


def belief_read_out(
    features: jax.Array,
    beliefs: jax.Array,
    held_out: jax.Array,
    key: jax.Array,
    *,
    ridge: jax.typing.ArrayLike,
) -> ReadOut:
    """Measures how well a linear map, with intercept, reads beliefs from features.

    W = argmin_D mean |(x - x̄) D - (β - β̄)|² + λ |D|²   over rows that are not held out
    R² = 1 - Σ |β - β̄ - (x - x̄) W|² / Σ |β - β̄|²        over rows that are

    x̄ and β̄ are means over the fitted rows, also in the held-out sum: so 0 is what the
    best constant from the fitted rows reaches, and a map that has learned nothing has
    exactly 0.

    λ = ridge times the mean variance of a feature, so that neither the unit of the
    features nor a rotation of them matters. Null: the same with the beliefs of the
    fitted rows permuted, once; the more features per row, the further below 0.

    Args:
      features: x (n, d), such as the residual stream.
      beliefs: β (n, C), probabilities.
      held_out: (n,) boolean, True where the row is not fitted. Hold out whole
        sequences: positions of the same sequence are not independent.
      key: of the permutation.
      ridge: at least 0; 0 gives the least-norm solution.

    Returns:
      ReadOut, classes pooled; not valid without fitted or held-out rows, or where the
      held-out beliefs are all β̄ but for rounding.
    """
    chex.assert_rank([features, beliefs], 2)
    chex.assert_equal_shape_prefix([features, beliefs], 1)
    chex.assert_shape(held_out, features.shape[:1])
    chex.assert_type(held_out, bool)
    judged = held_out.astype(features.dtype)[:, None]
    fitted = 1 - judged
    count = jnp.maximum(jnp.sum(fitted), 1)
    first = jnp.argmin(held_out)
    x, known_to = _centred(features, fitted[:, 0], first)
    size, basis = m_steps.eigh(_product(x.T, fitted * x) / count)
    # Directions in which features vary by rounding only are left out.
    of_largest = 4 * len(size) * jnp.finfo(size.dtype).eps * jnp.max(size)
    felt = size > jnp.maximum(of_largest, known_to**2)
    x_turned = _product(x, basis)
    stiffness = jnp.where(felt, size + ridge * jnp.mean(jnp.maximum(size, 0)), 1)

    def score(beliefs: jax.Array) -> Measurement:
        y, known_to = _centred(beliefs, fitted[:, 0], first)
        turned = _product(x_turned.T, fitted * y) / count
        slope = jnp.where(felt[:, None], turned / stiffness[:, None], 0)
        missed = jnp.sum(judged * (y - _product(x_turned, slope)) ** 2)
        spread = jnp.sum(judged * y**2)
        alike = jnp.max(judged * jnp.abs(y)) <= known_to
        return diagnostics.divided(spread - missed, jnp.where(alike, 0, spread))

    # Fitted rows first: in their order, and in a random one.
    chance = jax.random.uniform(key, held_out.shape)
    order, shuffled = jnp.argsort(held_out), jnp.argsort(jnp.where(held_out, 2, chance))
    answers = score(beliefs), score(beliefs.at[order].set(beliefs[shuffled]))
    some = jnp.any(~held_out)
    broken = ~(jnp.isfinite(features).all() & jnp.isfinite(beliefs).all())
    return ReadOut(
        *(
            _broken_if(broken, Measurement(jnp.where(some, value, 0), valid & some))
            for value, valid in answers
        )
    )


def key_axes(key_vectors: jax.Array, key: jax.Array, *, draws: int) -> KeyAxes:
    """Measures how orthogonal keys are, beside random and shuffled keys.

    mean over j ≠ k of |cos(k_j, k_k)|: 0 orthogonal, 1 all along one line

    More keys than dimensions cannot be orthogonal. Nulls, each a mean over draws:
    random Gaussian keys have |cos| near √(2 / π d), so that small numbers need no
    learning where d is large; shuffled keys have the same values in each coordinate,
    such as an offset that all share, in random combinations.

    Args:
      key_vectors: (n, d); zero vectors have no direction and are left out.
      key: of the draws.
      draws: how many of either null, 1 or more.

    Returns:
      KeyAxes; not valid below two directions. Directions are not checked: of keys
      about their mean, set to 0 what is rounding first, see `diagnostics`.

    Raises:
      ValueError: fewer than 1 draw.

    Source: arXiv 2512.22471, orthogonal key bases.
    """
    chex.assert_rank(key_vectors, 2)
    _check_draws(draws)
    of_random, of_order = jax.random.split(key)

    has_one = jnp.any(key_vectors != 0, axis=1)
    place = jnp.argsort(~has_one, stable=True)  # vectors with a direction first

    def shuffled(key: jax.Array) -> Measurement:
        chance = jax.random.uniform(key, key_vectors.shape)
        order = jnp.argsort(jnp.where(has_one[:, None], chance, 2), axis=0)
        mixed = jnp.take_along_axis(key_vectors, order, axis=0)
        mixed = jnp.zeros_like(key_vectors).at[place].set(mixed)
        return diagnostics.orthogonality(mixed).absolute

    # As the keys of orthogonal inputs: X = I, K = W.
    n, d = key_vectors.shape
    random = diagnostics.key_null(
        of_random, jnp.eye(n, dtype=key_vectors.dtype), d, draws
    )
    answers = KeyAxes(
        diagnostics.orthogonality(key_vectors).absolute,
        diagnostics.mean(random.absolute),
        diagnostics.mean(jax.lax.map(shuffled, jax.random.split(of_order, draws))),
    )
    found, at_random, mixed = answers
    broken = ~jnp.isfinite(key_vectors).all()
    return KeyAxes(_broken_if(broken, found), at_random, _broken_if(broken, mixed))


def _ranks(x: jax.Array, tolerance: jax.typing.ArrayLike) -> jax.Array:
    """Centred ranks (n,) from -1/2 to 1/2; numbers within tolerance are tied."""
    rising = jnp.sort(x)
    below = jnp.searchsorted(rising, x - tolerance, side="left")
    up_to = jnp.searchsorted(rising, x + tolerance, side="right")
    # Integers up to here, so that a constant has exactly 0.
    return (below + up_to - len(x)).astype(x.dtype) / (2 * len(x))


def _correlation(rank: jax.Array, other: jax.Array) -> Measurement:
    """Correlation of centred ranks."""
    size = jnp.sqrt(jnp.sum(rank**2)) * jnp.sqrt(jnp.sum(other**2))
    value, valid = diagnostics.divided(jnp.vdot(rank, other), size)
    return Measurement(jnp.clip(value, -1, 1), valid)


def _sizes(ranks: jax.Array, other: jax.Array) -> Measurement:
    """|correlation| (m,) of each row of centred ranks (m, n) with others (n,)."""
    value, valid = jax.vmap(_correlation, (0, None))(ranks, other)
    return Measurement(jnp.abs(value), valid)


def _share(part: jax.Array, whole: jax.Array) -> Measurement:
    """A part as a share of the whole, not above 1 by rounding."""
    value, valid = diagnostics.divided(part, whole)
    return Measurement(jnp.minimum(value, 1), valid)


def _centred(
    points: jax.Array, share: jax.Array, reference
) -> tuple[jax.Array, jax.Array]:
    """Points (n, d) about their mean, in a unit in which the largest number is 1.

    Relative to a reference point first, so that a constant is exactly 0, not rounding
    that the unit would magnify: `diagnostics.centred` of some of them.

    Args:
      points: (n, d).
      share: (n,) 1 for points that define mean and unit, 0 for others.
      reference: index of one of these.

    Returns:
      The points, and the largest difference that may be rounding. If all points with
      a share differ by no more, all others within it of their mean are 0, too.
    """
    moved = points - points[reference][None]
    total = jnp.maximum(jnp.sum(share), 1)
    centred = moved - jnp.sum(share[:, None] * moved, axis=0)[None] / total
    mine = jnp.where(share[:, None] > 0, points, points[reference][None])
    known_to = diagnostics.rounding(mine)
    near = ~diagnostics.differ(mine) & (jnp.abs(centred) <= known_to)
    centred = jnp.where(near, 0, centred)
    unit = jnp.max(share[:, None] * jnp.abs(centred))
    unit = jnp.where(unit > 0, unit, 1)
    return centred / unit, known_to / unit


def _check_draws(draws: int) -> None:
    if draws < 1:
        raise ValueError(f"draws={draws!r}: must be 1 or more")


def _broken_if(broken: jax.Array, measurement: Measurement) -> Measurement:
    """NaN and valid, so that it is seen, where the inputs are not finite."""
    return Measurement(
        jnp.where(broken, jnp.nan, measurement.value), measurement.valid | broken
    )
