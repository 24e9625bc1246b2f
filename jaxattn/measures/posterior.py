"""Distances of a model's predictive from the exact posterior, position by position.

In bits. A task flags impossible evidence by NaN, which every number here passes on.
-inf in `log_bayes` is a class that Bayes rules out.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.theory import losses


class Calibration(NamedTuple):
    """Mean probability by Bayes, in bins of the probability p by the model."""

    predicted: jax.Array  # (bins,) mean p of the model; NaN in an empty bin
    exact: jax.Array  # (bins,) mean β of Bayes; NaN in an empty bin
    share: jax.Array  # (bins,) of all pairs, by their weight; sums to 1
    error: jax.Array  # Σ_bins share |predicted - exact|


def kl(log_bayes: jax.Array, logit: jax.Array) -> jax.Array:
    """KL divergence from the exact posterior to the model.

    KL_i = Σ_c β_ic (log₂ β_ic - log₂ p_ic),  at least 0

    Args:
      log_bayes: log β (T, C), nats.
      logit: the model's (T, C).

    Returns:
      (T,) in bits: 0 only where they are equal, inf where the model rules out what
      Bayes does not. Its mean over positions is `losses.kl_to_bayes` / log 2.
    """
    _check(log_bayes, logit, rank=2)
    return _each(losses.kl_to_bayes)(log_bayes, logit) / math.log(2)


def total_variation(log_bayes: jax.Array, logit: jax.Array) -> jax.Array:
    """Total variation between the exact posterior and the model.

    ½ Σ_c |β_ic - p_ic|

    Args:
      log_bayes: log β (T, C), nats.
      logit: the model's (T, C).

    Returns:
      (T,) from 0 (equal) to 1 (disjoint); at most √(KL ln 2 / 2).

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
    """Absolute error of the model's entropy, on a sequence.

    |H_i(model) - H_i(Bayes)|

    In its mean over sequences errors of opposite sign do not cancel. It can be 0 where
    the model is wrong, since any permutation of the posterior has the same entropy;
    `kl` cannot.

    Args:
      log_bayes: log β (T, C), nats.
      logit: the model's (T, C).

    Returns:
      (T,) in bits, at least 0.
    """
    _check(log_bayes, logit, rank=2)
    return jnp.abs(entropy(logit) - entropy(log_bayes))


def averaged_entropy_error(log_bayes: jax.Array, logit: jax.Array) -> jax.Array:
    """Absolute error of the model's entropy averaged over sequences.

    |mean_n H_ni(model) - mean_n H_ni(Bayes)|

    It can be 0 where every single sequence is wrong, since errors of opposite sign
    cancel. At most the mean over sequences of `entropy_error`.

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
    """Calibration of the model against the exact posterior.

    error = Σ_bins share |mean p - mean β|, over all pairs of a position and a class

    Drawn targets, and their noise, do not enter. A calibrated model need not know
    anything: one that always predicts the average of all posteriors has error 0. All C
    classes of a position count, also those that are nearly ruled out, so the error is
    at most 2/C times the mean total variation.

    Args:
      log_bayes: log β of all sequences together (N, T, C), nats.
      logit: the model's (N, T, C).
      weight: of each position (N, T), at least 0; each class has 1/C of it.
      bins: how many, of equal width in p from 0 to 1; an edge belongs to the upper
        bin.

    Returns:
      Calibration. A bin without weight is empty: NaN means, share 0. If every weight
      is zero, all bins are empty, and the error is 0. A position that is NaN makes
      the means of its bins, and the error, NaN, whatever its weight.

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
    # The gap is summed itself: the difference of two sums would be mostly rounding.
    terms = jnp.stack([share, share * p, share * beta, share * (p - beta)], axis=3)

    def sums(terms: jax.Array, bin_of: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(terms.reshape(-1, 4), bin_of.reshape(-1), bins)

    # Sequence by sequence first: one long sum in float32 would lose digits.
    total, predicted, exact, gap = jnp.sum(jax.vmap(sums)(terms, bin_of), axis=0).T
    of_a_pair = jnp.where(total > 0, total, jnp.nan)
    error = jnp.sum(jnp.abs(gap))
    return Calibration(predicted / of_a_pair, exact / of_a_pair, total, error)


def _check(log_bayes: jax.Array, logit: jax.Array, rank: int) -> None:
    """Checks that both are predictives of the same positions."""
    chex.assert_rank([log_bayes, logit], rank)
    chex.assert_equal_shape([log_bayes, logit])


def _each(mean_over_positions):
    """Computes for each position what a loss averages over positions."""
    return jax.vmap(lambda *rows: mean_over_positions(*(row[None] for row in rows)))
