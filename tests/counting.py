"""Tasks against counting: all that can be drawn, with its probability, is listed."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.tasks.base import Batch

# A support lists what a small task can draw: (tokens, targets, probability), targets
# None where nothing is asked for.


def draw(task, key):
    """A sequence, and its exact posteriors."""
    batch = task.sample(key)
    return batch, task.bayes(batch)


def posteriors_by_counting(support, num_classes):
    """Prefix of tokens -> posterior of what is asked for at its end."""
    mass = collections.defaultdict(lambda: np.zeros(num_classes))
    for tokens, targets, p in support:
        for t, target in enumerate(targets):
            prefix = tokens[: t + 1]
            mass[prefix] += p / num_classes if target is None else 0
            if target is not None:
                mass[prefix][target] += p
    return {prefix: p / p.sum() for prefix, p in mass.items()}


def assert_bayes_is_counting(task, support, sequences, num_classes):
    """Also flagged where, and only where, nothing that is drawn begins like this."""
    posteriors = posteriors_by_counting(support, num_classes)
    impossible = np.full(num_classes, np.nan)
    expected = [
        [posteriors.get(tuple(s[: t + 1]), impossible) for t in range(len(s))]
        for s in sequences.tolist()
    ]
    assert np.isnan(expected).any()
    assert not np.isnan(expected).all()
    bayes = jax.jit(jax.vmap(lambda tokens: task.bayes(Batch(tokens, None))))
    log_bayes = bayes(jnp.asarray(sequences, jnp.int32))
    np.testing.assert_allclose(np.exp(log_bayes), expected, atol=1e-6)


def assert_drawn_as_listed(task, support, draws):
    """Pearson's test, at five standard deviations, of all that can be drawn at once."""
    expected = collections.Counter()
    for tokens, targets, p in support:
        expected[tokens, targets] += p * draws
    assert sum(expected.values()) == pytest.approx(draws)
    assert min(expected.values()) > 5
    batch = jax.jit(jax.vmap(task.sample))(jax.random.split(jax.random.key(0), draws))
    targets = np.asarray(batch.targets).astype(object)
    if batch.weights is not None:
        unasked = np.asarray(batch.weights) == 0
        assert (targets[unasked] == 0).all()
        targets[unasked] = None
    rows = zip(batch.inputs.tolist(), targets.tolist(), strict=True)
    observed = collections.Counter((tuple(x), tuple(y)) for x, y in rows)
    assert observed.keys() <= expected.keys()
    pearson = sum((observed[x] - e) ** 2 / e for x, e in expected.items())
    freedom = len(expected) - 1
    assert abs(pearson - freedom) < 5 * np.sqrt(2 * freedom)
