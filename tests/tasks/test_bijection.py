"""Bijection elimination against counting all bijections."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from counting import assert_bayes_is_counting, assert_drawn_as_listed

from jaxattn.tasks.base import Batch
from jaxattn.tasks.bijection import bijection, num_tokens, scored


def support_of(num_symbols, num_pairs):
    symbols = range(num_symbols)
    pairs = itertools.product(
        itertools.permutations(symbols, num_pairs), itertools.permutations(symbols)
    )
    for keys, values in pairs:
        tokens = [x for k in keys for x in (k, num_symbols + values[k])]
        targets = [x for k in keys for x in (values[k], None)]
        p = 1 / math.perm(num_symbols, num_pairs) / math.factorial(num_symbols)
        yield tuple(tokens[:-1]), tuple(targets[:-1]), p


def test_bayes_is_what_counting_all_bijections_gives():
    task = bijection(num_symbols=3, num_pairs=3)
    every_sequence = np.array(list(itertools.product(range(-1, 7), repeat=5)))
    assert_bayes_is_counting(task, support_of(3, 3), every_sequence, 3)


def test_bijections_are_drawn_uniformly():
    support = list(support_of(4, 3))
    assert_drawn_as_listed(bijection(num_symbols=4, num_pairs=3), support, draws=20_000)
    asked = np.array([target is not None for target in support[0][1]])
    np.testing.assert_array_equal(scored(3), asked)
    assert max(map(max, (x for x, _, _ in support))) == num_tokens(4) - 1


def test_entropy_falls_one_value_at_a_time():
    n = 1000
    task = bijection(num_symbols=n, num_pairs=n)
    rng = np.random.default_rng(0)
    values = rng.permutation(n)
    tokens = np.stack([rng.permutation(n), n + values], axis=1).ravel()[:-1]
    batch = Batch(jnp.asarray(tokens, jnp.int32), None)
    log_bayes = np.asarray(jax.jit(task.bayes)(batch))[::2]
    finite = np.where(np.isfinite(log_bayes), log_bayes, 0)
    bits = -np.sum(np.exp(log_bayes) * finite, axis=1) / np.log(2)
    np.testing.assert_allclose(bits, np.log2(n - np.arange(n)), atol=1e-4)
    at_target = log_bayes[np.arange(n), values]
    np.testing.assert_allclose(at_target, -np.log(n - np.arange(n)), atol=1e-5)
