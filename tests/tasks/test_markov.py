"""Finite Markov chains: entropy rates, and filters against sums over every path."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.tasks import markov
from jaxattn.tasks.hmm import labelled


@pytest.mark.parametrize(
    ("transition", "stationary", "rate"),
    [
        (np.full((8, 8), 1 / 8), 1 / 8, np.log(8)),
        (np.eye(4), 1 / 4, 0),  # of many, the smallest
        # Not circulant: weights must be the stationary ones.
        (
            [[0.8, 0.2], [0.4, 0.6]],
            [2 / 3, 1 / 3],
            -(0.8 * np.log(0.8) + 0.2 * np.log(0.2)) * 2 / 3
            - (0.4 * np.log(0.4) + 0.6 * np.log(0.6)) / 3,
        ),
    ],
)
def test_stationary_distribution_and_entropy_rate(transition, stationary, rate):
    found = markov.stationary_distribution(transition)
    np.testing.assert_allclose(found, np.broadcast_to(stationary, found.shape))
    assert markov.entropy_rate(transition) == pytest.approx(rate)


def brute_force(initial, transition, likelihood):
    """Posterior and prediction by summing over every latent path."""
    length, n = likelihood.shape
    posterior, prediction = np.zeros((length, n)), np.zeros((length, n))
    for t in range(length):
        for path in itertools.product(range(n), repeat=t + 1):
            p = initial[path[0]] * np.prod(
                [transition[a, b] for a, b in itertools.pairwise(path)]
            )
            p *= np.prod([likelihood[i, z] for i, z in enumerate(path)])
            posterior[t, path[-1]] += p
        posterior[t] /= posterior[t].sum()
        prediction[t] = posterior[t] @ transition
    return posterior, prediction


def test_filter_equals_every_path(x64):
    rng = np.random.default_rng(0)
    for n, length in ((2, 8), (3, 6), (4, 5)):
        initial, transition = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(n), n)
        transition[0, 1] = 0  # a step that cannot be
        transition /= transition.sum(axis=1, keepdims=True)
        likelihood = rng.random((length, n))
        with np.errstate(divide="ignore"):
            logs = [np.log(x) for x in (initial, transition, likelihood)]
        filtered = jax.jit(markov.forward_filter)(*map(jnp.asarray, logs))
        posterior, prediction = brute_force(initial, transition, likelihood)
        np.testing.assert_allclose(
            np.exp(filtered.log_posterior), posterior, atol=1e-14
        )
        np.testing.assert_allclose(
            np.exp(filtered.log_prediction), prediction, atol=1e-14
        )


def test_what_was_all_but_ruled_out_is_remembered():
    """Odds of 9^5000 against, then a symbol that settles it the other way."""
    frozen = labelled(np.eye(2), [[0.9, 0.1, 0], [0.1, 0.8, 0.1]])
    symbols = jnp.asarray([0] * 5000 + [2, 0, 3, 0], jnp.int32)
    log_belief = jax.jit(markov.labelled_filter)(
        jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.asarray(frozen, float)), symbols
    )
    odds = np.log(9) * np.arange(1, 5001)
    difference = log_belief[:5000, 0] - log_belief[:5000, 1]
    np.testing.assert_allclose(difference, odds, rtol=1e-4)
    np.testing.assert_array_equal(np.exp(log_belief[5000:5002]), [[0, 1], [0, 1]])
    assert np.isnan(log_belief[5002:]).all()
