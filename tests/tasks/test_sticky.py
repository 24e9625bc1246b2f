"""The sticky chain, and its exact posteriors against sums over every path."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import draw

from jaxattn.tasks import SPECS, markov
from jaxattn.tasks.base import Batch
from jaxattn.tasks.sticky import sticky, transition_matrix

# 0.3 + 0.7 * 0.3 / (0.3 + 2 (1 + 1/2 + 1/3) + 1/4), see configs/sticky.py
SCRIPT_STAY = 0.349802


def small_task(**changes):
    fields = {"length": 7, "num_symbols": 3, "d_x": 2, "stay": 0.5}
    return sticky(**fields | changes, embedding_key=jax.random.key(5))


def embedding_of(num_symbols, d_x):
    """As a task above draws it, in float32."""
    with jax.enable_x64(False):
        return np.asarray(jax.random.normal(jax.random.key(5), (num_symbols, d_x)))


def predictions(inputs, embedding, transition):
    """p(y_t | x_1..x_t), scaled, in float64."""
    difference = np.asarray(inputs, np.float64)[:, None] - embedding[None]
    log_likelihood = -np.sum(difference**2, axis=2) / 2
    prediction = np.full(len(transition), 1 / len(transition))
    for row in log_likelihood - log_likelihood.max(axis=1, keepdims=True):
        posterior = prediction * np.exp(row)
        prediction = posterior / posterior.sum() @ transition
        yield prediction


def test_transition_matrix_is_the_script_s():
    transition = transition_matrix(8, SCRIPT_STAY)
    expected = {0: 0.349802, 1: 0.166008, 2: 0.083004, 3: 0.055336, 4: 0.041502}
    for i, j in itertools.product(range(8), repeat=2):
        distance = min((i - j) % 8, (j - i) % 8)
        assert transition[i, j] == pytest.approx(expected[distance], abs=1e-6)
    np.testing.assert_allclose(transition.sum(axis=1), 1, atol=1e-15)
    assert markov.entropy_rate(transition) == pytest.approx(1.8292, abs=5e-5)


@pytest.mark.parametrize("num_symbols", [2, 3, 5, 8])
@pytest.mark.parametrize("stay", [0.0, 0.3, 1.0])
def test_transition_matrix_has_rows_of_probabilities(num_symbols, stay):
    transition = transition_matrix(num_symbols, stay)
    assert (transition >= 0).all()
    np.testing.assert_allclose(transition.sum(axis=1), 1, atol=1e-15)
    np.testing.assert_allclose(np.diag(transition), stay)


def test_bayes_equals_every_path(x64):
    task = small_task()
    transition = transition_matrix(3, 0.5)
    embedding = np.asarray(jax.random.normal(jax.random.key(5), (3, 2)))
    keys = jax.random.split(jax.random.key(0), 5)
    batch, log_bayes = jax.jit(jax.vmap(lambda key: draw(task, key)))(keys)
    for inputs, found in zip(batch.inputs, log_bayes, strict=True):
        distance = np.sum((inputs[:, None] - embedding[None]) ** 2, axis=2)
        likelihood = np.exp(-distance / 2)
        expected = np.zeros((6, 3))
        for t in range(6):
            for path in itertools.product(range(3), repeat=t + 1):
                moves = [transition[a, b] for a, b in itertools.pairwise(path)]
                seen = [likelihood[i, z] for i, z in enumerate(path)]
                expected[t] += np.prod(moves) * np.prod(seen) * transition[path[-1]]
            expected[t] /= expected[t].sum()
        np.testing.assert_allclose(np.exp(found), expected, atol=1e-14)


def test_bayes_at_10_000_positions_in_float32():
    task = small_task(length=10_001, num_symbols=8, d_x=20, stay=SCRIPT_STAY)
    batch, log_bayes = jax.jit(lambda key: draw(task, key))(jax.random.key(0))
    assert log_bayes.dtype == jnp.float32
    transition = transition_matrix(8, SCRIPT_STAY)
    exact = list(predictions(batch.inputs, embedding_of(8, 20), transition))
    np.testing.assert_allclose(log_bayes, np.log(exact), atol=2e-5)


def test_impossible_evidence_is_flagged_from_there_on(x64):
    task = small_task()
    batch = jax.jit(task.sample)(jax.random.key(0))
    broken = Batch(batch.inputs.at[3].set(jnp.inf), batch.targets)
    flagged = np.isnan(jax.jit(task.bayes)(broken)).all(axis=1)
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
    # x_t is the embedding of the symbol `lag` before y_t, plus unit noise.
    lag = SPECS["sticky"].lag
    noise = np.asarray(batch.inputs[lag:]) - embedding_of(8, 3)[symbols[:-lag]]
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose(noise.std(axis=0), 1, atol=0.02)
    np.testing.assert_allclose(np.bincount(symbols) / len(symbols), 1 / 8, atol=0.02)


def test_bayes_is_calibrated_and_between_its_bounds():
    """Its mean loss equals its mean entropy, above the entropy rate, below chance."""
    task = small_task(length=2001, num_symbols=8, d_x=20, stay=0.3)

    @jax.jit
    @jax.vmap
    def per_sequence(key):
        batch, log_bayes = draw(task, key)
        nll = -jnp.take_along_axis(log_bayes, batch.targets[:, None], axis=1).mean()
        return nll, -jnp.sum(jnp.exp(log_bayes) * log_bayes, axis=1).mean()

    nll, entropy = per_sequence(jax.random.split(jax.random.key(0), 64))
    error = np.std(nll - entropy, ddof=1) / 8
    assert abs(np.mean(nll - entropy)) < 4 * error
    rate = SPECS["sticky"].entropy_rate({"num_symbols": 8, "stay": 0.3})
    assert rate == markov.entropy_rate(transition_matrix(8, 0.3))
    assert rate < np.mean(nll) < np.log(8)
