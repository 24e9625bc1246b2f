"""Associative recall against counting all sequences."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import assert_bayes_is_counting, assert_drawn_as_listed, draw

from jaxattn.tasks.base import Batch
from jaxattn.tasks.recall import NUM_FILLERS, num_tokens, recall

SIZES = {"num_keys": 3, "num_values": 2, "num_pairs": 2, "num_queries": 2, "filler": 1}


def support_of(novel, num_keys, num_values, num_pairs, num_queries, filler):
    first_filler = num_keys + num_values
    marker = first_filler + NUM_FILLERS
    num_slots = num_pairs + 1 + num_queries + filler
    everything = itertools.product(
        itertools.permutations(range(num_keys), num_pairs),
        itertools.product(range(num_values), repeat=num_keys),
        itertools.product(range(num_keys), repeat=num_queries),
        itertools.combinations(range(num_slots), filler),
        itertools.product(range(first_filler, marker), repeat=filler),
    )
    count = (
        math.perm(num_keys, num_pairs)
        * num_values**num_keys
        * math.comb(num_slots, filler)
        * NUM_FILLERS**filler
    )
    for shown, values, queries, slots, kinds in everything:
        p = 1 / count
        for query in queries:
            old = query in shown
            kin = num_pairs if old else num_keys - num_pairs
            p *= (1 - novel if old else novel) / kin
        if p == 0:
            continue
        units = [[(k, None), (num_keys + values[k], None)] for k in shown]
        units += [[(marker, None)], *([(q, values[q])] for q in queries)]
        for slot, kind in zip(slots, kinds, strict=True):
            units.insert(slot, [(kind, None)])
        tokens, targets = zip(*itertools.chain(*units), strict=True)
        yield tokens, targets, p


@pytest.mark.parametrize("novel", [0, 0.3, 1])
def test_bayes_is_what_counting_all_sequences_gives(novel):
    support = list(support_of(novel, **SIZES))
    rng = np.random.default_rng(0)
    sequences = np.array([tokens for tokens, _, _ in support])
    sequences = np.tile(sequences[rng.choice(len(sequences), 3000)], (5, 1))
    # One token wrong, or two, or none: any token anywhere.
    for _ in range(2):
        rows = np.flatnonzero(rng.random(len(sequences)) < 0.7)
        columns = rng.integers(sequences.shape[1], size=len(rows))
        sequences[rows, columns] = rng.integers(-1, 11, size=len(rows))
    assert_bayes_is_counting(recall(**SIZES, novel=novel), support, sequences, 2)


def test_sequences_are_drawn_as_listed():
    support = list(support_of(0.3, **SIZES))
    assert_drawn_as_listed(recall(**SIZES, novel=0.3), support, draws=100_000)


def test_two_values_for_one_key_are_flagged_from_the_second_key_on():
    task = recall(**SIZES, novel=0.3)
    # k0 v1 filler k0 v0 marker k0 k0; never before the second k0, which already
    # cannot be, whatever its value.
    tokens = jnp.array([0, 4, 5, 0, 3, 9, 0, 0], jnp.int32)
    flagged = np.isnan(jax.jit(task.bayes)(Batch(tokens, None))).all(axis=1)
    np.testing.assert_array_equal(flagged, np.arange(8) >= 3)


def test_10_000_positions():
    fields = {"num_keys": 4000, "num_values": 8, "num_pairs": 3000}
    fields |= {"num_queries": 2000, "filler": 1999, "novel": 0.25}
    task = recall(**fields)
    batch, log_bayes = jax.jit(lambda key: draw(task, key))(jax.random.key(0))
    tokens, targets = batch.inputs.tolist(), batch.targets.tolist()
    marker = tokens.index(num_tokens(4000, 8) - 1)
    pairs = {k: v - 4000 for k, v in itertools.pairwise(tokens[:marker]) if k < 4000}
    assert len(pairs) == 3000
    expected = np.full((10_000, 8), 1 / 8)
    for t in range(marker, 10_000):
        if tokens[t] in pairs:
            expected[t] = np.arange(8) == pairs[tokens[t]]
            assert targets[t] == pairs[tokens[t]]
    np.testing.assert_allclose(np.exp(log_bayes), expected, atol=1e-6)
    queries = np.asarray(batch.inputs)[np.asarray(batch.weights) == 1]
    assert len(queries) == 2000
    shown = np.isin(queries, list(pairs)).mean()
    assert abs(shown - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 2000)
