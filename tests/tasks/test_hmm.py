"""Hidden Markov models, spelt out or fixed, against sums over every hidden path."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import assert_bayes_is_counting, assert_drawn_as_listed, draw

from jaxattn.tasks import markov
from jaxattn.tasks.base import Batch
from jaxattn.tasks.hmm import (
    PROCESSES,
    fixed_hmm,
    header_length,
    hmm,
    labelled,
    log_beliefs,
    num_tokens,
    round_to_hundredths,
    scored,
)


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


# --- a model of its own in each sequence


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
def test_rows_are_rounded_to_integer_hundredths(n):
    rng = np.random.default_rng(n)
    rows = np.concatenate(
        [
            rng.dirichlet(np.ones(n), 200),
            rng.dirichlet(np.full(n, 0.1), 100),
            rng.dirichlet(np.full(n, 100), 100),
        ]
    ).astype(np.float32)
    result = jax.jit(jax.vmap(round_to_hundredths))(rows)
    assert result.dtype == jnp.int32
    assert (result >= 5).all()
    assert (result.sum(axis=1) == 100).all()
    np.testing.assert_array_equal(result, [rounded(row.tolist()) for row in rows])


def split_tokens(tokens, num_states, num_symbols):
    """P, E, observations, in numpy, of many sequences."""
    split = header_length(num_states, num_symbols)
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
    """5000 sequences with S = 3, O = 2, K = 6, and their exact beliefs."""
    task = hmm(num_states=3, num_symbols=2, num_observations=6)
    keys = jax.random.split(jax.random.key(0), 5000)

    return jax.jit(jax.vmap(lambda key: draw(task, key)))(keys)


@pytest.fixture(scope="module")
def small_hmm():
    """S = 3, O = 2, K = 4, in float64: tokens (N, 19) -> log beliefs (N, 19, 3)."""
    task = hmm(num_states=3, num_symbols=2, num_observations=4)
    bayes = jax.jit(jax.vmap(lambda tokens: task.bayes(Batch(tokens, None))))

    def run(tokens):
        with jax.enable_x64(True):
            return np.asarray(bayes(jnp.asarray(tokens, jnp.int32)))

    return run


def test_bayes_equals_every_path(small_hmm, many_hmms):
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
        ({15: 100}, 15),  # a number after it
        ({17: 0}, 17),
        ({18: 103}, 18),  # no token
        ({16: -1}, 16),
        ({16: 10**9}, 16),
        ({9: 100, 10: 0, 11: 100, 12: 0, 13: 100, 14: 0, 17: 102}, 17),
        ({}, 19),
    ],
)
def test_impossible_evidence_is_flagged_from_there_on(small_hmm, change, position):
    tokens = np.array([*HEADER, 101, 102, 102, 101])
    if 17 in change:
        tokens[15:] = 101
    else:
        assert np.isfinite(small_hmm(tokens[None])[0, 15:]).any(axis=1).all()
    tokens[list(change)] = list(change.values())
    flagged = np.isnan(small_hmm(tokens[None])[0])
    np.testing.assert_array_equal(flagged.all(axis=1), np.arange(19) >= position)
    np.testing.assert_array_equal(flagged.any(axis=1), np.arange(19) >= position)


def test_headers_are_rounded_dirichlet_rows(many_hmms):
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


def test_targets_are_the_exact_belief(many_hmms):
    batch, log_bayes = many_hmms
    asked = scored(3, 2, 6)
    np.testing.assert_array_equal(asked, np.arange(21) >= 15)
    np.testing.assert_array_equal(batch.weights, np.tile(asked, (5000, 1)))
    assert batch.inputs.max() == num_tokens(2) - 1
    np.testing.assert_allclose(batch.targets, np.exp(log_bayes), atol=1e-6)
    np.testing.assert_allclose(batch.targets[:, :15], 1 / 3, atol=1e-6)
    exact = [
        posterior for _, posterior in numpy_filter(*split_tokens(batch.inputs, 3, 2))
    ]
    np.testing.assert_allclose(
        batch.targets[:, 15:], np.stack(exact, axis=1), atol=2e-6
    )


def test_observations_follow_the_header(many_hmms):
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


def test_filter_at_10_000_observations_in_float32():
    task = hmm(num_states=3, num_symbols=2, num_observations=10_000)
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


# --- one model for all sequences


def test_processes_are_the_published_ones():
    for matrices in PROCESSES.values():
        assert (matrices >= 0).all()
        np.testing.assert_allclose(matrices.sum(axis=(0, 2)), 1, atol=1e-15)
    # α y = 0.85 · 0.9, β x = 0.075 · 0.05, α x = 0.85 · 0.05, β y = 0.075 · 0.9
    ay, bx, ax, by = 0.765, 0.00375, 0.0425, 0.0675
    expected = [
        [[ay, bx, bx], [ax, by, bx], [ax, bx, by]],
        [[by, ax, bx], [bx, ay, bx], [bx, ax, by]],
        [[by, bx, ax], [bx, by, ax], [bx, bx, ay]],
    ]
    np.testing.assert_allclose(PROCESSES["mess3"], expected, atol=1e-15)


@pytest.mark.parametrize("process", PROCESSES)
def test_fixed_hmm_equals_every_path(process):
    matrices = PROCESSES[process]
    num_symbols = len(matrices)
    task = fixed_hmm(process=process, length=3)
    support = list(word_support(matrices, 3))
    if process != "zero_one_random":  # one less to compile: the sampler is the same
        assert_drawn_as_listed(task, support, draws=20_000)
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
    matrices = PROCESSES[process]
    start = markov.stationary_distribution(matrices.sum(axis=0))
    expected = np.zeros((5, len(start)))
    for t in range(5):
        for path in itertools.product(range(len(start)), repeat=t + 2):
            moves = zip(symbols, path, path[1:], strict=False)
            expected[t, path[-1]] += start[path[0]] * math.prod(
                [matrices[move] for move in moves]
            )
    expected /= expected.sum(axis=1, keepdims=True)
    belief = np.exp(log_beliefs(matrices, jnp.array(symbols)))
    np.testing.assert_allclose(belief, expected, atol=1e-14)


def test_labelled_matrices_predict_as_the_chain_does(x64):
    rng = np.random.default_rng(0)
    transition = rng.dirichlet(np.ones(3), 3)
    emission = rng.dirichlet(np.ones(2), 3)
    symbols = jnp.asarray(rng.integers(2, size=30))
    process = labelled(transition, emission)
    np.testing.assert_allclose(process.sum(axis=0), transition, atol=1e-15)
    np.testing.assert_allclose(process.sum(axis=2).T, emission, atol=1e-15)
    filtered = markov.forward_filter(
        jnp.log(markov.stationary_distribution(transition)),
        jnp.log(transition),
        jnp.log(emission.T)[symbols],
    )
    belief = log_beliefs(process, symbols)
    np.testing.assert_allclose(belief, filtered.log_prediction, atol=1e-13)


@pytest.mark.parametrize("process", ["mess3", "even"])
def test_beliefs_at_10_000_positions_in_float32(process):
    matrices = PROCESSES[process]
    symbols = np.random.default_rng(0).integers(3, size=10_000)
    if process == "even":
        symbols[:] = 1  # never known for sure, never forgotten
    beliefs = jax.jit(lambda symbols: log_beliefs(matrices, symbols))
    log_belief = np.asarray(beliefs(jnp.asarray(symbols, jnp.int32)))
    assert log_belief.dtype == np.float32
    belief = markov.stationary_distribution(matrices.sum(axis=0))
    exact = []
    for symbol in symbols.tolist():
        belief = belief @ matrices[symbol]
        belief /= belief.sum()
        exact.append(belief)
    np.testing.assert_allclose(log_belief, np.log(exact), atol=1e-5)
