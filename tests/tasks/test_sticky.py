"""The sticky chain and its exact Bayes answer."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.tasks import markov
from jaxattn.tasks.base import Batch
from jaxattn.tasks.sticky import sticky, transition_matrix

# 0.3 + 0.7 * 0.3 / (0.3 + 2 (1 + 1/2 + 1/3) + 1/4), see configs/sticky.py
SCRIPT_STAY = 0.349802


def small_task(**changes):
    fields = {"length": 7, "num_symbols": 3, "d_x": 2, "stay": 0.5}
    return sticky(**fields | changes, embedding_key=jax.random.key(5))


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


def test_transition_matrix_is_the_script_s(references):
    transition = transition_matrix(8, SCRIPT_STAY)
    expected = {0: 0.349802, 1: 0.166008, 2: 0.083004, 3: 0.055336, 4: 0.041502}
    for i, j in itertools.product(range(8), repeat=2):
        distance = min((i - j) % 8, (j - i) % 8)
        assert transition[i, j] == pytest.approx(expected[distance], abs=1e-6)
    np.testing.assert_allclose(transition.sum(axis=1), 1, atol=1e-15)


@pytest.mark.parametrize("num_symbols", [2, 3, 5, 8])
@pytest.mark.parametrize("stay", [0.0, 0.3, 1.0])
def test_transition_matrix_has_rows_of_probabilities(num_symbols, stay):
    transition = transition_matrix(num_symbols, stay)
    assert (transition >= 0).all()
    np.testing.assert_allclose(transition.sum(axis=1), 1, atol=1e-15)
    np.testing.assert_allclose(np.diag(transition), stay)


def test_entropy_rate():
    assert markov.entropy_rate(transition_matrix(8, SCRIPT_STAY)) == pytest.approx(
        1.8292, abs=5e-5
    )
    assert markov.entropy_rate(np.full((8, 8), 1 / 8)) == pytest.approx(np.log(8))
    assert markov.entropy_rate(np.eye(4)) == pytest.approx(0)
    # Not circulant: weights must be the stationary ones, here 2/3 and 1/3.
    transition = np.array([[0.8, 0.2], [0.4, 0.6]])
    np.testing.assert_allclose(
        markov.stationary_distribution(transition), [2 / 3, 1 / 3]
    )
    entropy = -np.sum(transition * np.log(transition), axis=1)
    assert markov.entropy_rate(transition) == pytest.approx(entropy @ [2 / 3, 1 / 3])


def test_filter_equals_every_path(x64):
    rng = np.random.default_rng(0)
    for n, length in ((2, 8), (3, 6), (4, 5)):
        initial, transition = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(n), n)
        transition[0, 1] = 0  # a step that cannot be
        transition /= transition.sum(axis=1, keepdims=True)
        likelihood = rng.random((length, n))
        with np.errstate(divide="ignore"):
            logs = [np.log(x) for x in (initial, transition, likelihood)]
        filtered = markov.forward_filter(*map(jnp.asarray, logs))
        posterior, prediction = brute_force(initial, transition, likelihood)
        np.testing.assert_allclose(
            np.exp(filtered.log_posterior), posterior, atol=1e-14
        )
        np.testing.assert_allclose(
            np.exp(filtered.log_prediction), prediction, atol=1e-14
        )


def test_bayes_equals_every_path(x64):
    task = small_task()
    embedding = jax.random.normal(jax.random.key(5), (3, 2))
    for seed in range(5):
        batch = task.sample(jax.random.key(seed))
        distance = np.sum((batch.inputs[:, None] - embedding[None]) ** 2, axis=2)
        _, prediction = brute_force(
            np.full(3, 1 / 3), transition_matrix(3, 0.5), np.exp(-distance / 2)
        )
        np.testing.assert_allclose(np.exp(task.bayes(batch)), prediction, atol=1e-14)


def test_bayes_at_10_000_positions_in_float32():
    fields = {"length": 10_001, "num_symbols": 8, "d_x": 20, "stay": SCRIPT_STAY}
    batch = small_task(**fields).sample(jax.random.key(0))
    log_bayes = jax.jit(small_task(**fields).bayes)(batch)
    assert log_bayes.dtype == jnp.float32
    assert np.isfinite(log_bayes).all()
    with jax.enable_x64(True):
        # The same embeddings: the float32 ones, not a float64 draw.
        embedding = jnp.asarray(np.asarray(_embedding(8, 20), np.float64), jnp.float64)
        difference = jnp.asarray(batch.inputs, jnp.float64)[:, None] - embedding[None]
        exact = markov.forward_filter(
            jnp.full((8,), -np.log(8)),
            jnp.log(jnp.asarray(transition_matrix(8, SCRIPT_STAY))),
            -jnp.sum(difference**2, axis=2) / 2,
        ).log_prediction
    np.testing.assert_allclose(log_bayes, exact, atol=2e-5)


def _embedding(num_symbols, d_x):
    with jax.enable_x64(False):
        return jax.random.normal(jax.random.key(5), (num_symbols, d_x))


def test_impossible_evidence_is_flagged_from_there_on(x64):
    task = small_task()
    batch = task.sample(jax.random.key(0))
    broken = Batch(batch.inputs.at[3].set(jnp.inf), batch.targets)
    flagged = np.isnan(task.bayes(broken)).all(axis=1)
    np.testing.assert_array_equal(flagged, [False] * 3 + [True] * 3)


def test_samples_follow_the_chain():
    task = small_task(length=40_001, num_symbols=8, d_x=3, stay=0.3)
    batch = jax.jit(task.sample)(jax.random.key(0))
    assert batch.inputs.shape == (40_000, 3)
    symbols = np.asarray(batch.targets)
    counts = np.zeros((8, 8))
    np.add.at(counts, (symbols[:-1], symbols[1:]), 1)
    observed = counts / counts.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(observed, transition_matrix(8, 0.3), atol=0.03)
    # x_t is the embedding of the symbol before y_t, plus unit noise.
    noise = np.asarray(batch.inputs[1:] - _embedding(8, 3)[symbols[:-1]])
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose(noise.std(axis=0), 1, atol=0.02)
    np.testing.assert_allclose(np.bincount(symbols) / len(symbols), 1 / 8, atol=0.02)


def test_bayes_is_calibrated_and_between_its_bounds():
    """Its mean loss equals its mean entropy, above the entropy rate, below chance."""
    task = small_task(length=2001, num_symbols=8, d_x=20, stay=0.3)

    @jax.jit
    @jax.vmap
    def per_sequence(key):
        batch = task.sample(key)
        log_bayes = task.bayes(batch)
        nll = -jnp.take_along_axis(log_bayes, batch.targets[:, None], axis=1).mean()
        return nll, -jnp.sum(jnp.exp(log_bayes) * log_bayes, axis=1).mean()

    nll, entropy = per_sequence(jax.random.split(jax.random.key(0), 64))
    error = np.std(nll - entropy, ddof=1) / 8
    assert abs(np.mean(nll - entropy)) < 4 * error
    rate = markov.entropy_rate(transition_matrix(8, 0.3))
    assert rate < np.mean(nll) < np.log(8)
