"""Finite Markov chains: what is exact about them, whatever the task around them."""

from typing import NamedTuple

import chex
import jax
import numpy as np


class Filtered(NamedTuple):
    """Exact beliefs about the latent state along a sequence, in nats."""

    log_posterior: jax.Array  # (T, n), log p(z_t | x_1..x_t)
    log_prediction: jax.Array  # (T, n), log p(z_{t+1} | x_1..x_t)


def stationary_distribution(transition: np.ndarray) -> np.ndarray:
    """Distribution that the chain leaves unchanged, π P = π.

    Args:
      transition: P (n, n), rows sum to 1.

    Returns:
      π (n,), float64. Where several are stationary (a chain that cannot mix), the one
      of smallest Euclidean norm.
    """
    transition = np.asarray(transition, np.float64)
    chex.assert_shape(transition, (len(transition), len(transition)))
    equations = np.vstack(
        [transition.T - np.eye(len(transition)), np.ones(len(transition))]
    )
    constants = np.append(np.zeros(len(transition)), 1)
    return np.linalg.lstsq(equations, constants)[0]


def entropy_rate(transition: np.ndarray) -> float:
    """Uncertainty of the next state of a stationary chain that is seen perfectly.

    h = -Σ_i π_i Σ_j P_ij log P_ij

    Args:
      transition: P (n, n), rows sum to 1.

    Returns:
      h, in nats, between 0 and log n.
    """
    transition = np.asarray(transition, np.float64)
    surprise = np.log(transition, out=np.zeros_like(transition), where=transition > 0)
    row_entropy = -np.sum(transition * surprise, axis=1)
    return float(stationary_distribution(transition) @ row_entropy)


def forward_filter(
    log_initial: jax.Array, log_transition: jax.Array, log_likelihood: jax.Array
) -> Filtered:
    """Exact filter of a hidden Markov chain, in log space.

    p(z_t | x_1..x_t) ∝ p(x_t | z_t) p(z_t | x_1..x_{t-1})
    p(z_{t+1} | x_1..x_t) = Σ_z p(z | x_1..x_t) P_{z, z_{t+1}}

    Each step is normalised, so nothing under- or overflows at any length.

    Args:
      log_initial: log p(z_1) (n,).
      log_transition: log P (n, n), rows from, columns to; -inf where impossible.
      log_likelihood: log p(x_t | z) (T, n), up to a constant per position.

    Returns:
      Filtered. NaN from the first position on whose evidence no state allows.

    Source: Rabiner 1989, doi 10.1109/5.18626, equations 19 to 21 (scaled).
    """
    chex.assert_rank([log_initial, log_transition, log_likelihood], [1, 2, 2])

    def step(log_prediction, log_likelihood_t):
        log_joint = log_prediction + log_likelihood_t
        # With no state possible this is -inf - (-inf): the NaN that flags it.
        log_posterior = log_joint - jax.nn.logsumexp(log_joint)
        log_prediction = jax.nn.logsumexp(
            log_posterior[:, None] + log_transition, axis=0
        )
        return log_prediction, Filtered(log_posterior, log_prediction)

    return jax.lax.scan(step, log_initial, log_likelihood)[1]
