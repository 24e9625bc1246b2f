"""Finite Markov chains: stationary distributions, entropy rates, exact filters."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


class Filtered(NamedTuple):
    """Exact beliefs about the latent state along a sequence, in nats."""

    log_posterior: jax.Array  # (T, n), log p(z_t | x_1..x_t)
    log_prediction: jax.Array  # (T, n), log p(z_{t+1} | x_1..x_t)


def stationary_distribution(transition: np.ndarray) -> np.ndarray:
    """Computes the distribution that the chain leaves unchanged, π P = π.

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
    """Computes the entropy rate of a stationary chain whose states are observed.

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
    """Computes exact beliefs along a hidden Markov chain, in log space.

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


def labelled_filter(
    log_initial: jax.Array, log_labelled: jax.Array, symbols: jax.Array
) -> jax.Array:
    """Computes exact beliefs along a chain that emits as it moves, in log space.

    T^(o)_ij = p(z_{t+1} = j, x_t = o | z_t = i)
    p(z_{t+1} | x_1..x_t) ∝ Σ_z p(z | x_1..x_{t-1}) T^(x_t)_{z, z_{t+1}}

    Each step is normalised, so nothing under- or overflows at any length.

    Args:
      log_initial: log p(z_1) (n,).
      log_labelled: log T (O, n, n), symbols, rows from, columns to; -inf where
        impossible. Summed over symbols, rows sum to 1.
      symbols: x (T,), integers.

    Returns:
      log p(z_{t+1} | x_1..x_t) (T, n), in nats. NaN from the first position on whose
      symbol no state allows, such as one that is not in 0..O-1.

    Source: Shai et al. 2024, arXiv 2405.15943 (there not scaled).
    """
    chex.assert_rank([log_initial, log_labelled, symbols], [1, 3, 1])
    num_symbols = len(log_labelled)
    # One more symbol, which no state emits, stands for those out of range.
    log_labelled = jnp.pad(
        log_labelled, [(0, 1), (0, 0), (0, 0)], constant_values=-jnp.inf
    )
    known = (symbols >= 0) & (symbols < num_symbols)

    def step(log_belief, symbol):
        log_joint = jax.nn.logsumexp(log_belief[:, None] + log_labelled[symbol], axis=0)
        # With no state possible this is -inf - (-inf): the NaN that flags it.
        log_belief = log_joint - jax.nn.logsumexp(log_joint)
        return log_belief, log_belief

    return jax.lax.scan(step, log_initial, jnp.where(known, symbols, num_symbols))[1]
