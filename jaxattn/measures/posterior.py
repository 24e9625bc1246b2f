"""How close a model's predictive is to the exact posterior, position by position.

In bits. NaN is how a task flags impossible evidence: it comes through every number
here, never hidden. -inf in `log_bayes` is a class that Bayes rules out.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.theory import losses


class Calibration(NamedTuple):
    """What Bayes says where the model says p, in bins of p, and how far apart."""

    predicted: jax.Array  # (bins,) mean p of the model; NaN in an empty bin
    exact: jax.Array  # (bins,) mean β of Bayes; NaN in an empty bin
    share: jax.Array  # (bins,) of all pairs, by their weight; sums to 1
    error: jax.Array  # Σ_bins share |predicted - exact|


def kl(log_bayes: jax.Array, logit: jax.Array) -> jax.Array:
    """Distance from the exact posterior to the model.

    KL_i = Σ_c β_ic (log₂ β_ic - log₂ p_ic),  at least 0

    Args:
      log_bayes: log β (T, C), nats.
      logit: the model's (T, C).

    Returns:
      (T,) in bits: 0 only where they agree, inf where the model rules out what Bayes
      does not. Its mean over positions is `losses.kl_to_bayes` / log 2.
    """
    _check(log_bayes, logit, rank=2)
    return _each(losses.kl_to_bayes)(log_bayes, logit) / math.log(2)


def total_variation(log_bayes: jax.Array, logit: jax.Array) -> jax.Array:
    """Largest difference in the probability that both give to any set of classes.

    ½ Σ_c |β_ic - p_ic|

    Args:
      log_bayes: log β (T, C), nats.
      logit: the model's (T, C).

    Returns:
      (T,) from 0 (they agree) to 1 (nothing in common); at most √(KL ln 2 / 2).

    Source: the bound: Pinsker's inequality, with KL in bits.
    """
    _check(log_bayes, logit, rank=2)
    gap = jnp.exp(log_bayes) - jax.nn.softmax(logit)
    return jnp.sum(jnp.abs(gap), axis=1) / 2


def entropy(logit: jax.Array) -> jax.Array:
    """Entropy of the predicted class.

    H_i = -Σ_c p_ic log₂ p_ic

    Args:
      logit: (T, C), a model's, or log β of Bayes.

    Returns:
      (T,) in bits, from 0 (sure) to log₂ C.
    """
    chex.assert_rank(logit, 2)
    return _each(losses.predictive_entropy)(logit) / math.log(2)


def entropy_error(log_bayes: jax.Array, logit: jax.Array) -> jax.Array:
    """How far the model's entropy is from that of the exact posterior, on a sequence.

    |H_i(model) - H_i(Bayes)|

    Its mean over sequences is the mean absolute of per-sequence differences, in which
    errors of opposite sign do not cancel. It can be 0 where the model is wrong: any
    permutation of the posterior has its entropy. See `kl`, which cannot.

    Args:
      log_bayes: log β (T, C), nats.
      logit: the model's (T, C).

    Returns:
      (T,) in bits, at least 0.
    """
    _check(log_bayes, logit, rank=2)
    return jnp.abs(entropy(logit) - entropy(log_bayes))


def averaged_entropy_error(log_bayes: jax.Array, logit: jax.Array) -> jax.Array:
    """How far the entropy averaged over sequences is from that of the posterior.

    |mean_n H_ni(model) - mean_n H_ni(Bayes)|

    It can be 0 where every single sequence is wrong: sequences on which the model is
    too sure make up for others on which it is not sure enough. At most the mean over
    sequences of `entropy_error`.

    Args:
      log_bayes: log β of all sequences together (N, T, C), nats.
      logit: the model's (N, T, C).

    Returns:
      (T,) in bits, at least 0.

    Source: arXiv 2512.22471, entropy by position; the form is the companion paper's.
    """
    _check(log_bayes, logit, rank=3)
    gap = jax.vmap(entropy)(logit) - jax.vmap(entropy)(log_bayes)
    return jnp.abs(jnp.mean(gap, axis=0))


def calibration(
    log_bayes: jax.Array, logit: jax.Array, weight: jax.Array, bins: int
) -> Calibration:
    """Whether Bayes says p, on average, where the model says p.

    error = Σ_bins share |mean p - mean β|, over all pairs of a position and a class

    Measured against the exact posterior, not against drawn targets, so their noise does
    not enter. Calibrated is not informed: the model that always says the average of all
    posteriors has error 0. All C classes of a position count, also those that are
    nearly ruled out, so the error is at most 2/C times the mean total variation.

    Args:
      log_bayes: log β of all sequences together (N, T, C), nats.
      logit: the model's (N, T, C).
      weight: of each position (N, T), at least 0; each of its classes has a C-th.
      bins: how many, of equal width in p from 0 to 1; a p on an edge is in the upper.

    Returns:
      Calibration. A bin without weight is empty: NaN means, share 0. If every weight
      is zero, all bins are, and the error is 0. A position that is NaN makes the means
      of the bins that it falls in, and the error, NaN, whatever its weight.

    Raises:
      ValueError: fewer than 1 bin.
    """
    _check(log_bayes, logit, rank=3)
    chex.assert_shape(weight, logit.shape[:2])
    if bins < 1:
        raise ValueError(f"bins={bins!r}: must be 1 or more")
    p, beta = jax.nn.softmax(logit), jnp.exp(log_bayes)
    share = losses.position_shares(weight.reshape(-1), weight.size, p.dtype)
    share = jnp.broadcast_to(share.reshape(*weight.shape, 1) / p.shape[2], p.shape)
    bin_of = jnp.floor(jnp.where(jnp.isnan(p), 0, p) * bins).astype(jnp.int32)
    bin_of = jnp.minimum(bin_of, bins - 1)
    # The gap is summed as such: the difference of two sums would be mostly rounding.
    terms = jnp.stack([share, share * p, share * beta, share * (p - beta)], axis=3)

    def sums(terms: jax.Array, bin_of: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(terms.reshape(-1, 4), bin_of.reshape(-1), bins)

    # Sequence by sequence first: one long sum in float32 would lose digits.
    total, predicted, exact, gap = jnp.sum(jax.vmap(sums)(terms, bin_of), axis=0).T
    of_a_pair = jnp.where(total > 0, total, jnp.nan)
    error = jnp.sum(jnp.abs(gap))
    return Calibration(predicted / of_a_pair, exact / of_a_pair, total, error)


def _check(log_bayes: jax.Array, logit: jax.Array, rank: int) -> None:
    """Both are predictives of the same positions."""
    chex.assert_rank([log_bayes, logit], rank)
    chex.assert_equal_shape([log_bayes, logit])


def _each(mean_over_positions):
    """Of every position by itself what a loss averages over them."""
    return jax.vmap(lambda *rows: mean_over_positions(*(row[None] for row in rows)))
