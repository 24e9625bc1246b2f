"""Diagnostics of a head: routing, usage, agreement and geometry; pure functions.

The signals themselves (compatibility, advantage, column usage, prototype signals) are
in `laws`, the entropy of attention in `attention`. A number that is undefined (for a
fully masked row, an unused source, a vector without direction) is not `valid`: means
leave it out, and neither it nor its gradient is NaN.

Points that are all the same have no axes, but computed ones differ by rounding. So
whatever is computed from differences counts only those beyond `rounding`, see
`centred`. Directions are not checked: a caller that subtracts, as for keys about their
mean, must set to 0 what is rounding.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.measures.measurement import (
    Measurement,
    at_most_one,
    centred,
    differ,
    divided,
    mean,
    norm,
    rounding,
)
from jaxattn.theory import attention, laws, m_steps

# Including the names of `measurement`, which users call from here.
__all__ = [
    "Manifold",
    "Measurement",
    "Orthogonality",
    "advantage_spread",
    "centred",
    "coordinates",
    "differ",
    "dimension",
    "divided",
    "drift",
    "effective_sources",
    "explained",
    "gate",
    "key_null",
    "leading_share",
    "manifold",
    "mean",
    "orthogonality",
    "participation_ratio",
    "query_key_alignment",
    "relative_entropy",
    "rounding",
    "routing_pressure",
    "specialisation",
    "usage_entropy",
    "usage_gini",
]


class Orthogonality(NamedTuple):
    """Cosines between vectors."""

    absolute: Measurement  # mean |cos| over pairs: 0 orthogonal, 1 parallel or opposite
    signed: Measurement  # mean cos over pairs: 1 all parallel


class Manifold(NamedTuple):
    """Principal axes of points."""

    centre: jax.Array  # (d,)
    axes: jax.Array  # (k, d) orthonormal, by falling variance; k = min(n, d)
    variance: jax.Array  # (k,) along each, of all n points


# --- routing


def relative_entropy(weight: jax.Array, mask=None) -> Measurement:
    """Entropy of attention as a share of its largest possible value.

    H_i / log n_i, n_i the number of unmasked sources of i

    Args:
      weight: a (T, S).
      mask: (T, S) boolean; None: no source is masked.

    Returns:
      (T,) from 0 (one source) to 1 (equal shares); not valid where n_i < 2.
    """
    chex.assert_rank(weight, 2)
    allowed = jnp.ones(weight.shape, bool) if mask is None else jnp.asarray(mask)
    chex.assert_equal_shape([weight, allowed])
    count = jnp.sum(allowed, axis=1)
    choice = jnp.log(jnp.maximum(count, 1).astype(weight.dtype))
    return at_most_one(divided(attention.attention_entropy(weight), choice))


def effective_sources(weight: jax.Array) -> jax.Array:
    """Effective number of sources of each query.

    exp H_i

    Args:
      weight: a (T, S).

    Returns:
      (T,) from 1 to S; 0 for a fully masked row.
    """
    total = jnp.sum(weight, axis=1)
    sources = jnp.exp(attention.attention_entropy(weight))
    # Times the total, 1 unless the row is fully masked, so that a NaN is not hidden.
    return jnp.where(total == 0, 0, sources * total / jnp.where(total == 0, 1, total))


def routing_pressure(weight: jax.Array, advantage: jax.Array) -> jax.Array:
    """Variance of the compatibility under the attention weights.

    Σ_j a_ij A_ij²

    Args:
      weight: a (T, S).
      advantage: A (T, S).

    Returns:
      (T,) in (nats per unit of compatibility)², 0 where attention is one-hot,
      however large the advantages of sources without attention are.

    Source: the paper, section 8; `streaming.LawStatistics` has its sum over queries.
    """
    chex.assert_rank([weight, advantage], 2)
    chex.assert_equal_shape([weight, advantage])
    return jnp.sum(jnp.where(weight == 0, 0, weight * advantage**2), axis=1)


def advantage_spread(compatibility: jax.Array, mask=None) -> jax.Array:
    """Mean absolute deviation of the compatibility over the unmasked sources.

    (1 / n_i) Σ_j |b_ij - b̄_i|, over the n_i unmasked sources of i, b̄_i their mean

    Args:
      compatibility: b (T, S), from `laws.compatibility`.
      mask: (T, S) boolean; None: no source is masked.

    Returns:
      (T,) in nats per unit of weight; 0 where n_i < 2, or where compatibilities differ
      by rounding only.
    """
    chex.assert_rank(compatibility, 2)
    allowed = jnp.ones(compatibility.shape, bool) if mask is None else jnp.asarray(mask)
    chex.assert_equal_shape([compatibility, allowed])
    unmasked = jnp.where(allowed, compatibility, 0)
    allowed = allowed.astype(compatibility.dtype)
    equal = allowed / jnp.maximum(jnp.sum(allowed, axis=1, keepdims=True), 1)
    mean_of_all = jnp.sum(equal * unmasked, axis=1, keepdims=True)
    spread = jnp.sum(equal * jnp.abs(unmasked - mean_of_all), axis=1)
    return jnp.where(spread <= jax.vmap(rounding)(unmasked), 0, spread)


def gate(weight: jax.Array, compatibility: jax.Array, mask=None) -> Measurement:
    """Ratio of the score gradient to `advantage_spread`.

    Σ_j a_ij |A_ij| / advantage_spread_i, so that Σ_j |∂L/∂s_ij| = gate_i · spread_i

    Args:
      weight: a (T, S).
      compatibility: b (T, S), from `laws.compatibility`.
      mask: (T, S) boolean; None: no source is masked.

    Returns:
      (T,): 1 for equal shares; 0 for one-hot attention, which has no score gradient;
      above 1 where attention is on the best and the worst source. Not valid where the
      spread is 0.

    Source: the law ∂L/∂s = -a ∘ A (the paper, section 3), summed over sources.
    """
    spread = advantage_spread(compatibility, mask)
    advantage = laws.advantage(weight, compatibility)
    through = jnp.where(weight == 0, 0, weight * jnp.abs(advantage))
    return divided(jnp.sum(through, axis=1), spread)


def drift(weight: jax.Array, final: jax.Array) -> jax.Array:
    """Total variation between each query's attention and its final attention.

    ½ Σ_j |a_ij - final_ij|

    Args:
      weight: a (T, S).
      final: a (T, S).

    Returns:
      (T,) from 0 (equal) to 1 (disjoint).
    """
    chex.assert_rank([weight, final], 2)
    chex.assert_equal_shape([weight, final])
    return at_most_one(jnp.sum(jnp.abs(weight - final), axis=1) / 2)


# --- sources


def usage_entropy(usage: jax.Array) -> Measurement:
    """Entropy of the usage of sources, as a share of that of equal usage.

    -Σ_j p_j log p_j / log S, p_j = N_j / Σ N

    Args:
      usage: N (S,), from `laws.column_usage`.

    Returns:
      From 0 (one source is used) to 1; not valid for one source, or if none is used.
    """
    chex.assert_rank(usage, 1)
    share = divided(usage, jnp.sum(usage))
    entropy = attention.attention_entropy(share.value[None])[0]
    choice = jnp.log(jnp.asarray(len(usage), usage.dtype))
    return at_most_one(divided(entropy, jnp.where(share.valid.all(), choice, 0)))


def usage_gini(usage: jax.Array) -> Measurement:
    """Gini coefficient of the usage of sources.

    Σ_jk |N_j - N_k| / (2 S Σ N)

    Args:
      usage: N (S,), from `laws.column_usage`.

    Returns:
      From 0 (equal usage) to 1 - 1/S (one source is used); not valid if none is.
    """
    chex.assert_rank(usage, 1)
    size = len(usage)
    # By ranks, without an S x S array.
    rank = 2 * jnp.arange(1, size + 1, dtype=usage.dtype) - size - 1
    return divided(jnp.vdot(rank, jnp.sort(usage)), size * jnp.sum(usage))


def specialisation(weight: jax.Array, upstream: jax.Array) -> Measurement:
    """Agreement of the upstream gradients of the queries that use a source.

    ‖Σ_i a_ij u_i‖ / Σ_i a_ij ‖u_i‖, the mean resultant length

    Args:
      weight: a (T, S).
      upstream: u (T, d_v).

    Returns:
      (S,) from 0 (they cancel) to 1 (one direction); not valid for a source that no
      query with u ≠ 0 uses.

    Source: the paper, section 8 (specialisation); mean resultant length: Mardia, Jupp,
    Directional Statistics, 2.3.
    """
    chex.assert_rank([weight, upstream], 2)
    together, apart = norm(weight.T @ upstream), weight.T @ norm(upstream)
    return at_most_one(divided(together, apart))


# --- geometry


def orthogonality(vector: jax.Array) -> Orthogonality:
    """Mean absolute and signed cosine between keys, or other vectors.

    mean over j ≠ k of |cos(k_j, k_k)|, and of cos(k_j, k_k)

    Args:
      vector: (S, d); zero vectors have no direction and are left out.

    Returns:
      Orthogonality; not valid below two directions. In d dimensions random directions
      have a mean |cos| near √(2 / π d), see `key_null`.
    """
    chex.assert_rank(vector, 2)
    direction, has_one = _directions(vector)
    cosine = at_most_one(direction @ direction.T)
    pair = has_one[:, None] & has_one[None] & ~jnp.eye(len(vector), dtype=bool)
    return Orthogonality(
        mean(Measurement(jnp.abs(cosine), pair)), mean(Measurement(cosine, pair))
    )


def key_null(
    random_key: jax.Array, inputs: jax.Array, d_k: int, draws: int
) -> Orthogonality:
    """Orthogonality of untrained keys: K = X W, W random.

    Args:
      random_key: of the draws.
      inputs: X (S, d_x), those of the keys to compare with.
      d_k: width of the keys.
      draws: how many W, of independent N(0, 1).

    Returns:
      Orthogonality, each of (draws,): a null distribution.
    """
    chex.assert_rank(inputs, 2)

    def one(random_key: jax.Array) -> Orthogonality:
        shape = (inputs.shape[1], d_k)
        return orthogonality(
            inputs @ jax.random.normal(random_key, shape, inputs.dtype)
        )

    return jax.lax.map(one, jax.random.split(random_key, draws))


def query_key_alignment(
    weight: jax.Array, query: jax.Array, key: jax.Array
) -> Measurement:
    """Cosine between each query and the keys, weighted by attention.

    Σ_j a_ij cos(q_i, k_j) / Σ_j a_ij, over keys that have a direction

    Args:
      weight: a (T, S).
      query: q (T, d_k).
      key: k (S, d_k).

    Returns:
      (T,) from -1 to 1; not valid for a query without direction, or a fully masked
      row.
    """
    chex.assert_rank([weight, query, key], 2)
    (of_query, has_query), (of_key, has_key) = map(_directions, (query, key))
    used = jnp.where(has_query[:, None] & has_key[None], weight, 0)
    cosine = of_query @ of_key.T
    return at_most_one(divided(jnp.sum(used * cosine, axis=1), jnp.sum(used, axis=1)))


def manifold(points: jax.Array) -> Manifold:
    """Principal axes of points, such as the values of all steps of a trajectory.

    The sign of an axis is such that its largest component, the first if several are,
    is above 0, so that equal points give equal pictures. Not differentiable: axes of
    equal variance have no derivative.

    Args:
      points: (n, d); a trajectory (steps, S, d) as (steps S, d), so that all of it
        has one basis.

    Returns:
      Manifold; a variance that is rounding is 0: all of them are for points that do
      not `differ`, whose axes mean nothing.
    """
    chex.assert_rank(points, 2)
    centre = points[0] + jnp.mean(points - points[0][None], axis=0)
    _, singular, axes = jnp.linalg.svd(centred(points), full_matrices=False)
    largest = jnp.argmax(jnp.abs(axes), axis=1, keepdims=True)
    sign = jnp.where(jnp.take_along_axis(axes, largest, axis=1) < 0, -1, 1)
    variance = singular**2 / len(points)
    variance = jnp.where(variance <= rounding(points) ** 2, 0, variance)
    return Manifold(centre, axes * sign, variance)


def coordinates(manifold: Manifold, points: jax.Array) -> jax.Array:
    """Projects points (..., d) on the axes of a manifold: (..., k)."""
    flat = points.reshape(-1, points.shape[-1]) - manifold.centre[None]
    return (flat @ manifold.axes.T).reshape(*points.shape[:-1], -1)


def explained(variance: jax.Array) -> Measurement:
    """Share of the variance along each axis (k,); not valid if the sum is 0."""
    chex.assert_rank(variance, 1)
    return divided(variance, jnp.sum(variance))


def leading_share(points: jax.Array, axes: int) -> Measurement:
    """Share of the variance of points (n, d) along their first principal axes.

    Args:
      points: (n, d), as for `manifold`.
      axes: how many, such as 2.

    Returns:
      From min(axes / d, 1) to 1; not valid for points that do not `differ`, such as a
      single one.

    Raises:
      ValueError: fewer than 1 axis.
    """
    chex.assert_rank(points, 2)
    if axes < 1:
        raise ValueError(f"axes={axes!r}: must be 1 or more")
    about = centred(points)
    variance, _ = m_steps.eigh(about.T @ about / len(points))
    leading = jnp.sum(jnp.maximum(variance, 0)[-axes:])
    return at_most_one(divided(leading, jnp.sum(about**2) / len(points)))


def participation_ratio(variance: jax.Array) -> jax.Array:
    """Effective number of axes of the variance.

    (Σ λ)² / Σ λ²

    Args:
      variance: λ (k,).

    Returns:
      From 1 (a line) to k (a ball); 0 where all variances are.
    """
    share = explained(variance)
    ratio = divided(jnp.ones((), variance.dtype), jnp.sum(share.value**2))
    bounded = jnp.clip(ratio.value, 1, len(variance))
    return jnp.where(ratio.valid, bounded, 0)


def dimension(variance: jax.Array, share: float) -> jax.Array:
    """Smallest number of axes that explain a share of the variance, such as 0.95.

    Args:
      variance: (k,), falling.
      share: above 0, at most 1.

    Returns:
      An integer from 1 to k; 0 where all variances are.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share!r}: must be above 0, at most 1")
    explained_by = jnp.cumsum(variance)
    # To rounding: else the last of equal axes may be one too many.
    missing = explained_by < (share - 1e-6) * explained_by[-1]
    return jnp.where(explained_by[-1] > 0, jnp.sum(missing) + 1, 0)


def _directions(vector: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unit vectors (n, d), and which vectors (n,) have a direction."""
    # Divided by the largest entry first, or the square of a short vector is 0.
    size = jnp.max(jnp.abs(vector), axis=1, keepdims=True)
    scaled = vector / jnp.where(size > 0, size, 1)
    measurement = divided(scaled, norm(scaled)[:, None])
    return measurement.value, size[:, 0] > 0
