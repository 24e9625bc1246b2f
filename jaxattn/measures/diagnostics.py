"""What a head is doing: routing, usage, agreement, geometry, as pure functions.

The signals themselves (compatibility, advantage, column usage, prototype signals) are
in `laws`, the entropy of attention in `attention`. Where a question has no answer (a
query that sees nothing, a source that nobody uses, a vector without direction) the
answer is marked as not `valid`, and left out of means; it is never NaN, also in
gradients.

Points that all are the same have no axes, and differ by rounding alone as soon as they
were computed: so what is asked of differences between numbers is asked of those beyond
`rounding` only, see `centred`. A direction is taken as given: whoever makes vectors by
subtraction, such as keys about their mean, has to leave out rounding before asking.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.measures.measurement import (
    Measurement,
    centred,
    differ,
    divided,
    mean,
    rounding,
)
from jaxattn.theory import attention, laws, m_steps

# Also what lies in `measurement`, for those who call it from here.
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
    """How the directions of vectors lie to each other."""

    absolute: Measurement  # mean |cos| over pairs: 0 orthogonal, 1 parallel or opposite
    signed: Measurement  # mean cos over pairs: 1 all alike, below 0 apart


class Manifold(NamedTuple):
    """Principal axes of points."""

    centre: jax.Array  # (d,)
    axes: jax.Array  # (k, d) orthonormal, by falling variance; k = min(n, d)
    variance: jax.Array  # (k,) along each, of all n points


# --- routing


def relative_entropy(weight: jax.Array, mask=None) -> Measurement:
    """Entropy of attention as a share of what a query could spread over.

    H_i / log n_i, n_i the number of sources that i may look at

    Args:
      weight: a (T, S).
      mask: (T, S) boolean; None: no source is masked.

    Returns:
      (T,) from 0 (one source) to 1 (all alike); not valid where n_i < 2: no choice.
    """
    chex.assert_rank(weight, 2)
    seen = jnp.ones(weight.shape, bool) if mask is None else jnp.asarray(mask)
    chex.assert_equal_shape([weight, seen])
    count = jnp.sum(seen, axis=1)
    choice = jnp.log(jnp.maximum(count, 1).astype(weight.dtype))
    return _at_most_one(divided(attention.attention_entropy(weight), choice))


def effective_sources(weight: jax.Array) -> jax.Array:
    """How many sources each query looks at, in effect.

    exp H_i

    Args:
      weight: a (T, S).

    Returns:
      (T,) from 1 to S; 0 for a query that looks nowhere.
    """
    total = jnp.sum(weight, axis=1)
    sources = jnp.exp(attention.attention_entropy(weight))
    # Times the total, 1 where a query looks at all, so that a NaN is not hidden.
    return jnp.where(total == 0, 0, sources * total / jnp.where(total == 0, 1, total))


def routing_pressure(weight: jax.Array, advantage: jax.Array) -> jax.Array:
    """How hard the loss pulls at each query's attention.

    Σ_j a_ij A_ij²: the variance of the compatibility under the weights

    Args:
      weight: a (T, S).
      advantage: A (T, S).

    Returns:
      (T,) in (nats per unit of compatibility)², 0 where attention is one-hot: the gate
      is shut, however large the advantage of sources without attention.

    Source: the paper, section 8; `streaming.LawStatistics` has its sum over queries.
    """
    chex.assert_rank([weight, advantage], 2)
    chex.assert_equal_shape([weight, advantage])
    return jnp.sum(jnp.where(weight == 0, 0, weight * advantage**2), axis=1)


def advantage_spread(compatibility: jax.Array, mask=None) -> jax.Array:
    """How differently the unmasked sources would serve each query.

    (1 / n_i) Σ_j |b_ij - b̄_i|, over the n_i sources that i may look at, b̄_i their mean

    Args:
      compatibility: b (T, S), from `laws.compatibility`.
      mask: (T, S) boolean; None: no source is masked.

    Returns:
      (T,) in nats per unit of weight; 0 where there is no choice, or where they serve
      alike but for rounding.
    """
    chex.assert_rank(compatibility, 2)
    seen = jnp.ones(compatibility.shape, bool) if mask is None else jnp.asarray(mask)
    chex.assert_equal_shape([compatibility, seen])
    in_sight = jnp.where(seen, compatibility, 0)
    seen = seen.astype(compatibility.dtype)
    equal = seen / jnp.maximum(jnp.sum(seen, axis=1, keepdims=True), 1)
    mean_of_all = jnp.sum(equal * in_sight, axis=1, keepdims=True)
    spread = jnp.sum(equal * jnp.abs(in_sight - mean_of_all), axis=1)
    return jnp.where(spread <= jax.vmap(rounding)(in_sight), 0, spread)


def gate(weight: jax.Array, compatibility: jax.Array, mask=None) -> Measurement:
    """How much of that difference the attention lets through to the scores.

    Σ_j a_ij |A_ij| / advantage_spread_i, so that Σ_j |∂L/∂s_ij| = gate_i · spread_i

    Args:
      weight: a (T, S).
      compatibility: b (T, S), from `laws.compatibility`.
      mask: (T, S) boolean; None: no source is masked.

    Returns:
      (T,): 1 for equal shares; 0 for one-hot attention, which nothing can move; above 1
      where attention lies on the best and the worst source. not valid where all serve
      alike.

    Source: the law ∂L/∂s = -a ∘ A (the paper, section 3), summed over sources.
    """
    spread = advantage_spread(compatibility, mask)
    advantage = laws.advantage(weight, compatibility)
    through = jnp.where(weight == 0, 0, weight * jnp.abs(advantage))
    return divided(jnp.sum(through, axis=1), spread)


def drift(weight: jax.Array, final: jax.Array) -> jax.Array:
    """How far each query's attention is from where it ends.

    ½ Σ_j |a_ij - a_ij at the end|, the total variation

    Args:
      weight: a (T, S).
      final: a (T, S).

    Returns:
      (T,) from 0 (there) to 1 (nothing in common).
    """
    chex.assert_rank([weight, final], 2)
    chex.assert_equal_shape([weight, final])
    return _at_most_one(jnp.sum(jnp.abs(weight - final), axis=1) / 2)


# --- sources


def usage_entropy(usage: jax.Array) -> Measurement:
    """How evenly attention is spread over sources, as a share of all alike.

    -Σ_j p_j log p_j / log S, p_j = N_j / Σ N

    Args:
      usage: N (S,), from `laws.column_usage`.

    Returns:
      From 0 (one source takes it all) to 1; not valid for one source, or without use.
    """
    chex.assert_rank(usage, 1)
    share = divided(usage, jnp.sum(usage))
    entropy = attention.attention_entropy(share.value[None])[0]
    choice = jnp.log(jnp.asarray(len(usage), usage.dtype))
    return _at_most_one(divided(entropy, jnp.where(share.valid.all(), choice, 0)))


def usage_gini(usage: jax.Array) -> Measurement:
    """How unevenly attention is spread over sources.

    Σ_jk |N_j - N_k| / (2 S Σ N), the Gini coefficient

    Args:
      usage: N (S,), from `laws.column_usage`.

    Returns:
      From 0 (all alike) to 1 - 1/S (one takes it all); not valid without use.
    """
    chex.assert_rank(usage, 1)
    size = len(usage)
    # Sorted, each differs from those before it by its own share: no S x S array.
    rank = 2 * jnp.arange(1, size + 1, dtype=usage.dtype) - size - 1
    return divided(jnp.vdot(rank, jnp.sort(usage)), size * jnp.sum(usage))


def specialisation(weight: jax.Array, upstream: jax.Array) -> Measurement:
    """How far the queries that use a source ask the same of it.

    ‖Σ_i a_ij u_i‖ / Σ_i a_ij ‖u_i‖, the mean resultant length

    Args:
      weight: a (T, S).
      upstream: u (T, d_v).

    Returns:
      (S,) from 0 (their signals cancel) to 1 (one direction); not valid for a source
      that no query with a signal uses.

    Source: the paper, section 8 (specialisation); mean resultant length: Mardia, Jupp,
    Directional Statistics, 2.3.
    """
    chex.assert_rank([weight, upstream], 2)
    together, apart = _norm(weight.T @ upstream), weight.T @ _norm(upstream)
    return _at_most_one(divided(together, apart))


# --- geometry


def orthogonality(vector: jax.Array) -> Orthogonality:
    """How orthogonal the directions of keys, or other vectors, are to each other.

    mean over j ≠ k of |cos(k_j, k_k)|, and of cos(k_j, k_k)

    Args:
      vector: (S, d); zero vectors have no direction, and are left out.

    Returns:
      Orthogonality; not valid below two directions. In d dimensions random directions
      have a mean |cos| near √(2 / π d): see `key_null` for what to compare with.
    """
    chex.assert_rank(vector, 2)
    direction, has_one = _directions(vector)
    cosine = _at_most_one(direction @ direction.T)
    pair = has_one[:, None] & has_one[None] & ~jnp.eye(len(vector), dtype=bool)
    return Orthogonality(
        mean(Measurement(jnp.abs(cosine), pair)), mean(Measurement(cosine, pair))
    )


def key_null(
    random_key: jax.Array, inputs: jax.Array, d_k: int, draws: int
) -> Orthogonality:
    """The orthogonality of keys that nothing was learned by: K = X W, W random.

    Args:
      random_key: of the draws.
      inputs: X (S, d_x), those of the keys to be compared.
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
    """How far each query points the way of the keys that it looks at.

    Σ_j a_ij cos(q_i, k_j) / Σ_j a_ij, over keys that have a direction

    Args:
      weight: a (T, S).
      query: q (T, d_k).
      key: k (S, d_k).

    Returns:
      (T,) from -1 to 1; not valid for a query without direction or that looks at none.
    """
    chex.assert_rank([weight, query, key], 2)
    (of_query, has_query), (of_key, has_key) = map(_directions, (query, key))
    used = jnp.where(has_query[:, None] & has_key[None], weight, 0)
    cosine = of_query @ of_key.T
    return _at_most_one(divided(jnp.sum(used * cosine, axis=1), jnp.sum(used, axis=1)))


def manifold(points: jax.Array) -> Manifold:
    """Principal axes of points, such as the values of all steps of a trajectory.

    The sign of an axis is such that its largest component, the first if several are,
    is above 0; so the same points always look the same. Not to be differentiated: axes
    of equal variance have no derivative.

    Args:
      points: (n, d); a trajectory (steps, S, d) as (steps S, d), so that all of it is
        seen along one basis.

    Returns:
      Manifold; the variance along an axis is 0 where it is rounding, so along all of
      them for points that do not `differ`, whose axes mean nothing.
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
    """Points (..., d) along the axes of a manifold: (..., k)."""
    flat = points.reshape(-1, points.shape[-1]) - manifold.centre[None]
    return (flat @ manifold.axes.T).reshape(*points.shape[:-1], -1)


def explained(variance: jax.Array) -> Measurement:
    """Share of the variance along each axis (k,); not valid if there is none at all."""
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
    """
    chex.assert_rank(points, 2)
    about = centred(points)
    variance, _ = m_steps.eigh(about.T @ about / len(points))
    leading = jnp.sum(jnp.maximum(variance, 0)[-axes:])
    return _at_most_one(divided(leading, jnp.sum(about**2) / len(points)))


def participation_ratio(variance: jax.Array) -> jax.Array:
    """Over how many axes the variance is spread, in effect.

    (Σ λ)² / Σ λ²

    Args:
      variance: λ (k,).

    Returns:
      From 1 (a line) to k (a ball); 0 for a single point.
    """
    share = explained(variance)
    ratio = divided(jnp.ones((), variance.dtype), jnp.sum(share.value**2))
    bounded = jnp.clip(ratio.value, 1, len(variance))
    return jnp.where(ratio.valid, bounded, 0)


def dimension(variance: jax.Array, share: float) -> jax.Array:
    """The fewest axes that hold a share of the variance, such as 0.95.

    Args:
      variance: (k,), falling.
      share: above 0, at most 1.

    Returns:
      Whole number from 1 to k; 0 for a single point.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share!r}: must be above 0, at most 1")
    held = jnp.cumsum(variance)
    # To rounding: else the last of equal axes may be one too many.
    missing = held < (share - 1e-6) * held[-1]
    return jnp.where(held[-1] > 0, jnp.sum(missing) + 1, 0)


def _at_most_one(shares: Measurement | jax.Array) -> Measurement | jax.Array:
    """Shares and cosines without what rounding adds to 1; derivatives stay."""

    def bounded(share: jax.Array) -> jax.Array:
        above = jax.lax.stop_gradient(jnp.maximum(jnp.abs(share) - 1, 0))
        return share - jnp.sign(share) * above

    if isinstance(shares, Measurement):
        return Measurement(bounded(shares.value), shares.valid)
    return bounded(shares)


def _norm(vector: jax.Array) -> jax.Array:
    """Lengths along the last axis, whose gradient at 0 is 0."""
    square = jnp.sum(vector**2, axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def _directions(vector: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unit vectors (n, d), and which vectors (n,) have a direction."""
    # By the largest part first, or the square of a short one is 0.
    size = jnp.max(jnp.abs(vector), axis=1, keepdims=True)
    scaled = vector / jnp.where(size > 0, size, 1)
    measurement = divided(scaled, _norm(scaled)[:, None])
    return measurement.value, size[:, 0] > 0
