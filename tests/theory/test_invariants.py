"""Invariants of every head, whatever the numbers: hypothesis searches exceptions."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxattn.theory import attention, laws

# Shapes are few, so that little is compiled; numbers are hypothesis's own.
LENGTHS = st.sampled_from([1, 4])
SIZES = st.sampled_from([1.0, 1e-6, 1e4])
RATE = 0.5


@st.composite
def heads(draw):
    """Scores, mask, values and upstream signals, T and S apart."""
    queries, sources, d_v = draw(LENGTHS), draw(LENGTHS), draw(st.sampled_from([1, 3]))

    def numbers(*shape):
        entry = st.floats(-1, 1, width=64).map(lambda x: x if abs(x) > 1e-9 else 0.0)
        return draw(SIZES) * draw(hnp.arrays(np.float64, shape, elements=entry))

    mask = draw(hnp.arrays(bool, (queries, sources)))
    score = numbers(queries, sources)
    return score, mask, numbers(sources, d_v), numbers(queries, d_v)


@jax.jit
def compiled_laws(score, mask, value, upstream):
    weight = attention.weights(score, mask)
    compatibility = laws.compatibility(upstream, value)
    advantage = laws.advantage(weight, compatibility)
    score_gradient = laws.score_gradient(weight, advantage)
    motion = laws.score_motion(weight, advantage, RATE)
    values = laws.value_motion(weight, upstream, RATE)
    return {
        "weight": weight,
        "compatibility": compatibility,
        "advantage": advantage,
        "score_gradient": score_gradient,
        "value_gradient": laws.value_gradient(weight, upstream),
        "usage": laws.column_usage(weight),
        "prototype": laws.prototype_signal(weight, upstream),
        "kernel": laws.overlap_kernel(weight),
        "entropy": attention.attention_entropy(weight),
        "entropy_slope": jax.grad(lambda a: attention.attention_entropy(a).sum())(
            weight
        ),
        "score_motion": motion,
        "weight_motion": laws.weight_motion(weight, motion),
        "content_motion": laws.content_motion(weight, values),
        "loss_change": laws.loss_change(score_gradient, motion),
        "descent_loss_change": laws.descent_loss_change(score_gradient, RATE),
    }


def laws_of(score, mask, value, upstream):
    return jax.tree.map(np.asarray, compiled_laws(score, mask, value, upstream))


def size(head):
    """Of a compatibility: what rounding is relative to."""
    _, _, value, upstream = head
    return np.abs(upstream).max() * np.abs(value).max() * value.shape[1]


@pytest.fixture(autouse=True, scope="module")
def _double():
    with jax.enable_x64(True):
        yield


@given(heads())
def test_nothing_is_ever_nan(head):
    found = laws_of(*head)
    for name, array in found.items():
        assert np.isfinite(array).all(), name
    masked = ~head[1].any(axis=1)
    for name in ("weight", "score_gradient", "entropy"):
        assert (found[name][masked] == 0).all()
    assert (found["entropy"] >= 0).all()
    assert (found["entropy"] <= np.log(head[1].shape[1]) + 1e-12).all()


@given(heads())
def test_score_gradient_rows_sum_to_zero(head):
    found = laws_of(*head)
    rows = np.abs(found["score_gradient"].sum(axis=1))
    assert (rows <= 1e-14 * size(head)).all()
    mean = np.abs((found["weight"] * found["advantage"]).sum(axis=1))
    assert (mean <= 1e-14 * size(head)).all()


@given(heads())
def test_usage_counts_the_queries_that_are_not_fully_masked(head):
    queries = head[1].any(axis=1).sum()
    found = laws_of(*head)
    assert float(found["usage"].sum()) == pytest.approx(queries, abs=1e-12)
    assert (found["usage"][~head[1].any(axis=0)] == 0).all()
    np.testing.assert_allclose(
        found["usage"][:, None] * found["prototype"],
        found["value_gradient"],
        atol=1e-12 * np.abs(head[3]).max() + 1e-300,
    )


@given(heads())
def test_overlap_kernel_is_positive_semidefinite(head):
    found = laws_of(*head)
    kernel = found["kernel"]
    np.testing.assert_allclose(kernel, kernel.T, atol=1e-15)
    assert np.linalg.eigvalsh(kernel).min() >= -1e-13
    rows = found["weight"] @ found["usage"]
    np.testing.assert_allclose(kernel.sum(axis=1), rows, atol=1e-13)


@given(heads(), st.randoms(use_true_random=False))
def test_permuting_sources_permutes_the_laws(head, random):
    score, mask, value, upstream = head
    order = list(range(len(value)))
    random.shuffle(order)
    found = laws_of(*head)
    moved = laws_of(score[:, order], mask[:, order], value[order], upstream)
    largest = np.abs(upstream).max() + 1e-300
    scales = dict.fromkeys(("compatibility", "advantage", "score_gradient"), size(head))
    scales |= dict.fromkeys(("value_gradient", "prototype"), 5 * largest)
    scales |= dict.fromkeys(("weight", "usage"), 5.0)
    for name, scale in scales.items():
        by_source = name in ("value_gradient", "prototype", "usage")
        expected = found[name][order] if by_source else found[name][:, order]
        np.testing.assert_allclose(
            moved[name], expected, rtol=0, atol=1e-14 * scale, err_msg=name
        )
    np.testing.assert_allclose(moved["kernel"], found["kernel"], rtol=0, atol=1e-14)


@given(heads(), hnp.arrays(np.float64, 5, elements=st.integers(-1000, 1000)))
def test_a_constant_on_a_row_of_scores_changes_nothing(head, constants):
    score, mask, value, upstream = head
    score = np.round(score * 64) / 64  # so that adding an integer is exact
    shifted = score + constants[: len(score), None]
    found = laws_of(score, mask, value, upstream)
    moved = laws_of(shifted, mask, value, upstream)
    for name, array in found.items():
        np.testing.assert_array_equal(moved[name], array, err_msg=name)


@given(heads())
def test_motions_keep_their_sums(head):
    found = laws_of(*head)
    for name in ("score_motion", "weight_motion"):
        assert (np.abs(found[name].sum(axis=1)) <= 1e-14 * size(head)).all()
    change = found["descent_loss_change"]
    assert change <= 0
    np.testing.assert_allclose(change, found["loss_change"], rtol=1e-12)
    # The kernel gives the same as the values themselves.
    np.testing.assert_allclose(
        found["content_motion"],
        -RATE * found["kernel"] @ head[3],
        atol=1e-13 * (np.abs(head[3]).max() + 1e-300),
    )
