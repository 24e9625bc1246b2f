"""The toy, and its exact Bayes answer."""

import itertools

import jax
import numpy as np

from jaxattn.tasks.toy import toy


def test_sequences_are_of_the_shapes_asked_for():
    batch = toy(length=5, num_classes=3, d_x=4).sample(jax.random.key(0))
    assert batch.inputs.shape == (5, 4)
    assert batch.targets.shape == (5,)


def test_inputs_and_labels_are_drawn_as_said():
    task = toy(length=8, num_classes=3, d_x=2)
    keys = jax.random.split(jax.random.key(1), 2000)
    batch = jax.jit(jax.vmap(task.sample))(keys)
    inputs = np.asarray(batch.inputs).reshape(-1)
    assert abs(inputs.mean()) < 4 / np.sqrt(inputs.size)
    assert abs(inputs.var() - 1) < 4 * np.sqrt(2 / inputs.size)
    share = np.bincount(np.asarray(batch.targets).ravel(), minlength=3) / 16000
    assert np.abs(share - 1 / 3).max() < 4 * np.sqrt(2 / 9 / 16000)
    sums = np.asarray(batch.inputs).sum(axis=2)
    together = np.corrcoef(np.c_[sums, batch.targets].T)
    assert np.abs(together - np.eye(16)).max() < 5 / np.sqrt(2000)


def test_bayes_is_what_counting_all_labels_gives():
    """Inputs say nothing of labels, so all label sequences are as likely."""
    task = toy(length=3, num_classes=2, d_x=1)
    batch = task.sample(jax.random.key(0))
    answer = np.exp(task.bayes(batch))
    everything = list(itertools.product(range(2), repeat=3))
    for position in range(3):
        before = tuple(np.asarray(batch.targets[:position]))
        alike = [labels for labels in everything if labels[:position] == before]
        counts = np.bincount([labels[position] for labels in alike], minlength=2)
        np.testing.assert_allclose(answer[position], counts / len(alike), rtol=1e-6)
