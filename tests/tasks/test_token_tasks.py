"""Wind tunnels: bijection elimination, HMM filtering and prediction, recall."""

import collections
import functools
import importlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.tasks import markov
from jaxattn.tasks.base import Batch
from jaxattn.tasks.sticky import sticky
from jaxattn.tasks.toy import toy

# The modules: `jaxattn.tasks` has the functions under their names.
bijection, hmm, recall = (
    importlib.import_module(f"jaxattn.tasks.{name}")
    for name in ("bijection", "hmm", "recall")
)

# What a small task can draw: (tokens, targets, probability). Targets are None where
# nothing is asked for.


def bijection_support(num_symbols, num_pairs):
    symbols = range(num_symbols)
    pairs = itertools.product(
        itertools.permutations(symbols, num_pairs), itertools.permutations(symbols)
    )
    for keys, values in pairs:
        tokens = [x for k in keys for x in (k, num_symbols + values[k])]
        targets = [x for k in keys for x in (values[k], None)]
        p = 1 / math.perm(num_symbols, num_pairs) / math.factorial(num_symbols)
        yield tuple(tokens[:-1]), tuple(targets[:-1]), p


RECALL = {"num_keys": 3, "num_values": 2, "num_pairs": 2, "num_queries": 2, "filler": 1}


def recall_support(novel, num_keys, num_values, num_pairs, num_queries, filler):
    first_filler = num_keys + num_values
    marker = first_filler + recall.NUM_FILLERS
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
        * recall.NUM_FILLERS**filler
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


def word_support(matrices, length):
    """Words of a process, by summing over every hidden path."""
    num_symbols, n, _ = matrices.shape
    start = markov.stationary_distribution(matrices.sum(axis=0))
    for word in itertools.product(range(num_symbols), repeat=length + 1):
        p = sum(
            start[path[0]]
            * math.prod(
                [
                    matrices[o, i, j]
                    for o, i, j in zip(word, path, path[1:], strict=False)
                ]
            )
            for path in itertools.product(range(n), repeat=length + 2)
        )
        if p > 0:
            yield word[:-1], word[1:], p


def answers_by_counting(support, num_classes):
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
    answers = answers_by_counting(support, num_classes)
    impossible = np.full(num_classes, np.nan)
    expected = [
        [answers.get(tuple(s[: t + 1]), impossible) for t in range(len(s))]
        for s in sequences.tolist()
    ]
    assert np.isnan(expected).any()
    assert not np.isnan(expected).all()
    bayes = jax.jit(jax.vmap(lambda tokens: task.bayes(Batch(tokens, None))))
    answer = bayes(jnp.asarray(sequences, jnp.int32))
    np.testing.assert_allclose(np.exp(answer), expected, atol=1e-6)


def assert_drawn_as_said(task, support, draws):
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


def numpy_filter(transition, emission, observations):
    """p(z_t | o_1..o_{t-1}) and p(z_t | o_1..o_t), scaled, in float64; many at once."""
    observations = np.moveaxis(observations, -1, 0)
    prediction = np.full(emission.shape[:-1], 1 / emission.shape[-2])
    for observation in observations:
        index = observation[..., None, None]
        joint = prediction * np.take_along_axis(emission, index, axis=-1)[..., 0]
        posterior = joint / joint.sum(axis=-1, keepdims=True)
        yield prediction, posterior
        prediction = np.einsum("...i,...ij->...j", posterior, transition)


def draw(task, key):
    batch = task.sample(key)
    return batch, task.bayes(batch)


# All of them


TASKS = {  # task, T, C, whether some positions do not count
    "bijection": (
        bijection.bijection(num_symbols=5, num_pairs=4),
        bijection.num_positions(4),
        5,
        True,
    ),
    "hmm": (
        hmm.hmm(num_states=2, num_symbols=3, num_observations=4),
        hmm.num_positions(2, 3, 4),
        2,
        True,
    ),
    "recall": (
        recall.recall(**RECALL, novel=0.3),
        recall.num_positions(2, 2, 1),
        2,
        True,
    ),
    "fixed_hmm": (hmm.fixed_hmm(process="even", length=6), 6, 2, False),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("double", [False, True])
def test_shapes_are_as_said_in_both_precisions(name, double):
    task, length, num_classes, weighted = TASKS[name]
    key = jax.random.key(0)
    with jax.enable_x64(double):
        batch, answer = jax.eval_shape(lambda key: draw(task, key), key)
    dtype = jnp.float64 if double else jnp.float32
    found = [None if x is None else (x.shape, x.dtype) for x in (*batch, answer)]
    targets = ((length,), jnp.int32)
    assert found == [
        ((length,), jnp.int32),
        ((length, num_classes), dtype) if name == "hmm" else targets,
        ((length,), jnp.float32) if weighted else None,
        ((length, num_classes), dtype),
    ]


# Bijection


def test_bijection_bayes_is_what_counting_all_bijections_gives():
    task = bijection.bijection(num_symbols=3, num_pairs=3)
    every_sequence = np.array(list(itertools.product(range(-1, 7), repeat=5)))
    assert_bayes_is_counting(task, bijection_support(3, 3), every_sequence, 3)


def test_bijections_are_drawn_uniformly():
    support = list(bijection_support(4, 3))
    task = bijection.bijection(num_symbols=4, num_pairs=3)
    assert_drawn_as_said(task, support, draws=20_000)
    asked = np.array([target is not None for target in support[0][1]])
    np.testing.assert_array_equal(bijection.scored(3), asked)
    assert max(map(max, (x for x, _, _ in support))) == bijection.num_tokens(4) - 1


def test_bijection_entropy_falls_one_value_at_a_time():
    n = 1000
    task = bijection.bijection(num_symbols=n, num_pairs=n)
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


# Recall


@pytest.mark.parametrize("novel", [0, 0.3, 1])
def test_recall_bayes_is_what_counting_all_sequences_gives(novel):
    support = list(recall_support(novel, **RECALL))
    rng = np.random.default_rng(0)
    sequences = np.array([tokens for tokens, _, _ in support])
    sequences = np.tile(sequences[rng.choice(len(sequences), 3000)], (5, 1))
    # One token wrong, or two, or none: any token anywhere.
    for _ in range(2):
        rows = np.flatnonzero(rng.random(len(sequences)) < 0.7)
        columns = rng.integers(sequences.shape[1], size=len(rows))
        sequences[rows, columns] = rng.integers(-1, 11, size=len(rows))
    task = recall.recall(**RECALL, novel=novel)
    assert_bayes_is_counting(task, support, sequences, 2)


def test_recall_is_drawn_as_said():
    support = list(recall_support(0.3, **RECALL))
    assert_drawn_as_said(recall.recall(**RECALL, novel=0.3), support, draws=100_000)


def test_two_values_for_one_key_are_flagged_from_the_second_key_on():
    task = recall.recall(**RECALL, novel=0.3)
    # k0 v1 filler k0 v0 marker k0 k0; never before the second k0, which already
    # cannot be, whatever its value.
    tokens = jnp.array([0, 4, 5, 0, 3, 9, 0, 0], jnp.int32)
    flagged = np.isnan(jax.jit(task.bayes)(Batch(tokens, None))).all(axis=1)
    np.testing.assert_array_equal(flagged, np.arange(8) >= 3)


def test_recall_at_10_000_positions():
    fields = {"num_keys": 4000, "num_values": 8, "num_pairs": 3000}
    fields |= {"num_queries": 2000, "filler": 1999, "novel": 0.25}
    task = recall.recall(**fields)
    batch, log_bayes = jax.jit(lambda key: draw(task, key))(jax.random.key(0))
    tokens = batch.inputs.tolist()
    marker = tokens.index(recall.num_tokens(4000, 8) - 1)
    pairs = {k: v - 4000 for k, v in itertools.pairwise(tokens[:marker]) if k < 4000}
    assert len(pairs) == 3000
    expected = np.full((10_000, 8), 1 / 8)
    for t in range(marker, 10_000):
        if tokens[t] in pairs:
            expected[t] = np.arange(8) == pairs[tokens[t]]
            assert batch.targets[t] == pairs[tokens[t]]
    np.testing.assert_allclose(np.exp(log_bayes), expected, atol=1e-6)
    queries = np.asarray(batch.inputs)[np.asarray(batch.weights) == 1]
    assert len(queries) == 2000
    shown = np.isin(queries, list(pairs)).mean()
    assert abs(shown - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 2000)


# HMM with a header


def rounded(p):
    """The docstring of `round_to_hundredths`, one hundredth at a time."""
    row = [max(round(100 * x), 5) for x in p]
    largest_first = sorted(range(len(row)), key=lambda i: -row[i])
    row[largest_first[0]] += max(100 - sum(row), 0)
    for i in largest_first:
        while sum(row) > 100 and row[i] > 5:
            row[i] -= 1
    return row


@pytest.mark.parametrize("n", [2, 5, 20])
def test_rows_are_rounded_to_whole_hundredths(n):
    rng = np.random.default_rng(n)
    rows = np.concatenate(
        [
            rng.dirichlet(np.ones(n), 200),
            rng.dirichlet(np.full(n, 0.1), 100),
            rng.dirichlet(np.full(n, 100), 100),
        ]
    ).astype(np.float32)
    result = jax.jit(jax.vmap(hmm.round_to_hundredths))(rows)
    assert result.dtype == jnp.int32
    assert (result >= 5).all()
    assert (result.sum(axis=1) == 100).all()
    np.testing.assert_array_equal(result, [rounded(row.tolist()) for row in rows])


def split_tokens(tokens, num_states, num_symbols):
    """P, E, observations, in numpy, of many sequences."""
    split = hmm.header_length(num_states, num_symbols)
    header = np.asarray(tokens, np.float64)[..., :split] / 100
    transition, emission = np.split(header, [num_states**2], axis=-1)
    batch = tokens.shape[:-1]
    return (
        transition.reshape(*batch, num_states, num_states),
        emission.reshape(*batch, num_states, num_symbols),
        np.asarray(tokens)[..., split:] - 101,
    )


def brute_force(transition, emission, observations):
    """p(z_t | o_1..o_t), summed over every hidden path; NaN where nothing is left."""
    n = len(transition)
    posterior = np.zeros((len(observations), n))
    for t in range(len(observations)):
        for path in itertools.product(range(n), repeat=t + 1):
            p = math.prod([transition[a, b] for a, b in itertools.pairwise(path)]) / n
            seen = zip(path, observations[: t + 1], strict=True)
            posterior[t, path[-1]] += p * math.prod([emission[z, o] for z, o in seen])
        total = posterior[t].sum()
        posterior[t] = posterior[t] / total if total > 0 else np.nan
    return posterior


# S = 3, O = 2: zeros make observations impossible, from all states or from some.
HEADER = [20, 30, 50, 0, 100, 0, 5, 0, 95, 100, 0, 40, 60, 0, 100]
SURE = [20, 30, 50, 0, 100, 0, 5, 0, 95, 100, 0, 100, 0, 100, 0]


@pytest.fixture(scope="module")
def many_hmms():
    """5000 sequences with S = 3, O = 2, K = 6, and their answers."""
    task = hmm.hmm(num_states=3, num_symbols=2, num_observations=6)
    keys = jax.random.split(jax.random.key(0), 5000)

    return jax.jit(jax.vmap(lambda key: draw(task, key)))(keys)


@pytest.fixture(scope="module")
def small_hmm():
    """S = 3, O = 2, K = 4, in float64: tokens (N, 19) -> answers (N, 19, 3)."""
    task = hmm.hmm(num_states=3, num_symbols=2, num_observations=4)
    bayes = jax.jit(jax.vmap(lambda tokens: task.bayes(Batch(tokens, None))))

    def run(tokens):
        with jax.enable_x64(True):
            return np.asarray(bayes(jnp.asarray(tokens, jnp.int32)))

    return run


def test_hmm_bayes_equals_every_path(small_hmm, many_hmms):
    headers = [*np.asarray(many_hmms[0].inputs)[:3, :15].tolist(), HEADER, SURE]
    words = itertools.product((101, 102), repeat=4)
    tokens = np.array([h + list(o) for h, o in itertools.product(headers, words)])
    answer = np.exp(small_hmm(tokens))
    np.testing.assert_allclose(answer[:, :15], 1 / 3, atol=1e-12)
    expected = [brute_force(*split_tokens(row, 3, 2)) for row in tokens]
    assert np.isnan(expected).any()
    np.testing.assert_allclose(answer[:, 15:], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "position"),
    [
        ({2: 49}, 2),  # a row that ends before 100
        ({2: 51}, 2),  # or after
        ({0: 60, 1: 41}, 1),  # too much already, before the row ends
        ({13: 1}, 14),  # the last row
        ({1: -1, 2: 81}, 1),  # sums to 100
        ({4: 101}, 4),  # an observation in the header
        ({1: 2**31 - 1}, 1),
        ({15: 100}, 15),  # a number behind it
        ({17: 0}, 17),
        ({18: 103}, 18),  # no token
        ({16: -1}, 16),
        ({16: 10**9}, 16),
        ({9: 100, 10: 0, 11: 100, 12: 0, 13: 100, 14: 0, 17: 102}, 17),
        ({}, 19),
    ],
)
def test_hmm_impossible_evidence_is_flagged_from_there_on(small_hmm, change, position):
    tokens = np.array([*HEADER, 101, 102, 102, 101])
    if 17 in change:
        tokens[15:] = 101
    else:
        assert np.isfinite(small_hmm(tokens[None])[0, 15:]).any(axis=1).all()
    tokens[list(change)] = list(change.values())
    flagged = np.isnan(small_hmm(tokens[None])[0])
    np.testing.assert_array_equal(flagged.all(axis=1), np.arange(19) >= position)
    np.testing.assert_array_equal(flagged.any(axis=1), np.arange(19) >= position)


def test_hmm_headers_are_rounded_dirichlet_rows(many_hmms):
    transition, emission, _ = split_tokens(many_hmms[0].inputs, 3, 2)
    for matrix in (transition, emission):
        np.testing.assert_allclose(matrix.sum(axis=-1), 1, atol=1e-12)
        assert matrix.min() == 0.05
    # Of three, one is below x with probability 1 - (1 - x)²; of two, with x. What is
    # rounded to 5 hundredths is below 0.055; half of 0.5 is too, but for ties.
    for matrix, smallest, variance in (
        (transition, 1 - 0.945**2, 1 / 18),
        (emission, 0.055, 1 / 12),
    ):
        share = np.mean(matrix == 0.05, axis=0)
        sigma = np.sqrt(smallest * (1 - smallest) / 5000)
        assert np.abs(share - smallest).max() < 4 * sigma
        mean = np.abs(matrix.mean(axis=0) - 1 / matrix.shape[-1])
        assert mean.max() < 4 * np.sqrt(variance / 5000)
    rows = np.concatenate([transition[..., 0], emission[..., 0]], axis=1)
    assert np.abs(np.corrcoef(rows.T) - np.eye(6)).max() < 4.5 / np.sqrt(5000)


def test_hmm_targets_are_the_exact_belief(many_hmms):
    batch, log_bayes = many_hmms
    scored = hmm.scored(3, 2, 6)
    np.testing.assert_array_equal(scored, np.arange(21) >= 15)
    np.testing.assert_array_equal(batch.weights, np.tile(scored, (5000, 1)))
    assert batch.inputs.max() == hmm.num_tokens(2) - 1
    np.testing.assert_allclose(batch.targets, np.exp(log_bayes), atol=1e-6)
    np.testing.assert_allclose(batch.targets[:, :15], 1 / 3, atol=1e-6)
    exact = [
        posterior for _, posterior in numpy_filter(*split_tokens(batch.inputs, 3, 2))
    ]
    np.testing.assert_allclose(
        batch.targets[:, 15:], np.stack(exact, axis=1), atol=2e-6
    )


def test_hmm_observations_follow_the_header(many_hmms):
    """What is seen differs from what was to be expected by chance only."""
    transition, emission, observations = split_tokens(many_hmms[0].inputs, 3, 2)
    unseen = np.full((5000, 1, 3), 1 / 3)  # p(z_{t+1}) of who has seen nothing
    filtered = numpy_filter(transition, emission, observations)
    for t, (prediction, _) in enumerate(filtered):
        unseen = unseen @ transition
        p = np.einsum("ni,ni->n", prediction, emission[..., 0])
        p_later = np.einsum("ni,ni->n", unseen[:, 0], emission[..., 0])
        surprise = (observations[:, t] == 0) - p
        # On the whole, where the header makes a zero likely, where what was seen or
        # another step of the chain would make it so.
        for weight in (1, p - 0.5, p - p_later):
            error = np.sqrt(np.mean(weight**2 * p * (1 - p)) / 5000)
            assert abs(np.mean(weight * surprise)) < 4 * error


def test_hmm_filter_at_10_000_observations_in_float32():
    task = hmm.hmm(num_states=3, num_symbols=2, num_observations=10_000)
    header = [90, 5, 5, 15, 80, 5, 5, 5, 90, 95, 5, 40, 60, 5, 95]
    observations = np.random.default_rng(0).integers(101, 103, size=10_000)
    tokens = np.concatenate([header, observations])
    batch = Batch(jnp.asarray(tokens, jnp.int32), None)
    log_bayes = np.asarray(jax.jit(task.bayes)(batch))
    assert log_bayes.dtype == np.float32
    assert np.isfinite(log_bayes).all()
    np.testing.assert_allclose(np.exp(log_bayes).sum(axis=1), 1, atol=1e-5)
    exact = [p for _, p in numpy_filter(*split_tokens(tokens, 3, 2))]
    np.testing.assert_allclose(log_bayes[15:], np.log(exact), atol=1e-5)


# Fixed processes


def test_processes_are_the_published_ones():
    for matrices in hmm.PROCESSES.values():
        assert (matrices >= 0).all()
        np.testing.assert_allclose(matrices.sum(axis=(0, 2)), 1, atol=1e-15)
    # α y = 0.85 · 0.9, β x = 0.075 · 0.05, α x = 0.85 · 0.05, β y = 0.075 · 0.9
    ay, bx, ax, by = 0.765, 0.00375, 0.0425, 0.0675
    expected = [
        [[ay, bx, bx], [ax, by, bx], [ax, bx, by]],
        [[by, ax, bx], [bx, ay, bx], [bx, ax, by]],
        [[by, bx, ax], [bx, by, ax], [bx, bx, ay]],
    ]
    np.testing.assert_allclose(hmm.PROCESSES["mess3"], expected, atol=1e-15)


@pytest.mark.parametrize("process", hmm.PROCESSES)
def test_fixed_hmm_equals_every_path(process):
    matrices = hmm.PROCESSES[process]
    num_symbols = len(matrices)
    task = hmm.fixed_hmm(process=process, length=3)
    support = list(word_support(matrices, 3))
    if process != "zero_one_random":  # one less to compile: the sampler is the same
        assert_drawn_as_said(task, support, draws=20_000)
    symbols = range(-2, num_symbols + 1)
    every_sequence = np.array(list(itertools.product(symbols, repeat=3)))
    assert_bayes_is_counting(task, support, every_sequence, num_symbols)


@pytest.mark.parametrize(
    ("process", "symbols"),
    [
        ("mess3", [0, 2, 2, 1, 0]),
        ("zero_one_random", [1, 0, 1, 1, 0]),
        ("even", [1, 1, 1, 0, 1]),
    ],
)
def test_beliefs_equal_every_path(process, symbols, x64):
    matrices = hmm.PROCESSES[process]
    start = markov.stationary_distribution(matrices.sum(axis=0))
    expected = np.zeros((5, len(start)))
    for t in range(5):
        for path in itertools.product(range(len(start)), repeat=t + 2):
            moves = zip(symbols, path, path[1:], strict=False)
            expected[t, path[-1]] += start[path[0]] * math.prod(
                [matrices[move] for move in moves]
            )
    expected /= expected.sum(axis=1, keepdims=True)
    belief = np.exp(hmm.log_beliefs(matrices, jnp.array(symbols)))
    np.testing.assert_allclose(belief, expected, atol=1e-14)


def test_labelled_matrices_predict_as_the_chain_does(x64):
    rng = np.random.default_rng(0)
    transition = rng.dirichlet(np.ones(3), 3)
    emission = rng.dirichlet(np.ones(2), 3)
    symbols = jnp.asarray(rng.integers(2, size=30))
    process = hmm.labelled(transition, emission)
    np.testing.assert_allclose(process.sum(axis=0), transition, atol=1e-15)
    np.testing.assert_allclose(process.sum(axis=2).T, emission, atol=1e-15)
    filtered = markov.forward_filter(
        jnp.log(markov.stationary_distribution(transition)),
        jnp.log(transition),
        jnp.log(emission.T)[symbols],
    )
    belief = hmm.log_beliefs(process, symbols)
    np.testing.assert_allclose(belief, filtered.log_prediction, atol=1e-13)


@pytest.mark.parametrize("process", ["mess3", "even"])
def test_beliefs_at_10_000_positions_in_float32(process):
    matrices = hmm.PROCESSES[process]
    symbols = np.random.default_rng(0).integers(3, size=10_000)
    if process == "even":
        symbols[:] = 1  # never known for sure, never forgotten
    beliefs = jax.jit(lambda symbols: hmm.log_beliefs(matrices, symbols))
    log_belief = np.asarray(beliefs(jnp.asarray(symbols, jnp.int32)))
    assert log_belief.dtype == np.float32
    belief = markov.stationary_distribution(matrices.sum(axis=0))
    exact = []
    for symbol in symbols.tolist():
        belief = belief @ matrices[symbol]
        belief /= belief.sum()
        exact.append(belief)
    np.testing.assert_allclose(log_belief, np.log(exact), atol=1e-5)


def test_what_was_all_but_ruled_out_is_remembered():
    """Odds of 9^5000 against, then a symbol that settles it the other way."""
    frozen = hmm.labelled(np.eye(2), [[0.9, 0.1, 0], [0.1, 0.8, 0.1]])
    symbols = jnp.asarray([0] * 5000 + [2, 0, 3, 0], jnp.int32)
    log_belief = markov.labelled_filter(
        jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.asarray(frozen, float)), symbols
    )
    odds = np.log(9) * np.arange(1, 5001)
    difference = log_belief[:5000, 0] - log_belief[:5000, 1]
    np.testing.assert_allclose(difference, odds, rtol=1e-4)
    np.testing.assert_array_equal(np.exp(log_belief[5000:5002]), [[0, 1], [0, 1]])
    assert np.isnan(log_belief[5002:]).all()


SIZES = {
    "sticky": {"length": 9, "num_symbols": 4, "d_x": 3, "stay": 0.3},
    "toy": {"length": 4, "num_classes": 3, "d_x": 2},
    "bijection": {"num_symbols": 4, "num_pairs": 3},
    "hmm": {"num_states": 3, "num_symbols": 3, "num_observations": 4},
    "fixed_hmm": {"process": "mess3", "length": 4},
    "recall": {
        "num_keys": 4,
        "num_values": 3,
        "num_pairs": 2,
        "num_queries": 2,
        "filler": 0,
        "novel": 0.5,
    },
}


@pytest.mark.parametrize(
    ("task", "field", "value"),
    [
        (task, field, value)
        for task, sizes in SIZES.items()
        for field in sizes
        for value in (
            {"process": ["none"], "stay": [-0.1, 2], "novel": [-0.1, np.nan]}.get(
                field, [-1, 2.5]
            )
        )
    ],
)
def test_a_number_that_no_task_has_is_named(task, field, value):
    build = {
        "sticky": functools.partial(sticky, embedding_key=jax.random.key(0)),
        "toy": toy,
        "bijection": bijection.bijection,
        "hmm": hmm.hmm,
        "fixed_hmm": hmm.fixed_hmm,
        "recall": recall.recall,
    }[task]
    build(**SIZES[task])
    with pytest.raises(ValueError, match=rf"^{field}={value!r}: must be "):
        build(**SIZES[task] | {field: value})
