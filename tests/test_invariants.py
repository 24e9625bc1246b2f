"""What holds for every head, whatever the numbers: hypothesis looks for exceptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxattn.theory import attention, laws

# Shapes are few, so that little is compiled; numbers are hypothesis's own.
LENGTHS = st.sampled_from([1, 4])
SIZES = st.sampled_from([1.0, 1e-6, 1e4])


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


def laws_of(score, mask, value, upstream):
    weight = attention.weights(jnp.asarray(score), mask)
    worth = laws.compatibility(jnp.asarray(upstream), jnp.asarray(value))
    advantage = laws.advantage(weight, worth)
    found = {
        "weight": weight,
        "compatibility": worth,
        "advantage": advantage,
        "score_gradient": laws.score_gradient(weight, advantage),
        "value_gradient": laws.value_gradient(weight, jnp.asarray(upstream)),
        "usage": laws.column_usage(weight),
        "prototype": laws.prototype_signal(weight, jnp.asarray(upstream)),
        "kernel": laws.overlap_kernel(weight),
    }
    return jax.tree.map(np.asarray, found)


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
    blind = ~head[1].any(axis=1)
    assert (found["weight"][blind] == 0).all()
    assert (found["score_gradient"][blind] == 0).all()
    entropy = attention.attention_entropy(found["weight"])
    slope = jax.grad(lambda a: attention.attention_entropy(a).sum())(found["weight"])
    assert np.isfinite(entropy).all()
    assert np.isfinite(slope).all()
    assert (np.asarray(entropy)[blind] == 0).all()
    assert (entropy >= 0).all()
    assert (entropy <= np.log(head[1].shape[1]) + 1e-12).all()


@given(heads())
def test_score_gradient_rows_sum_to_zero(head):
    found = laws_of(*head)
    rows = np.abs(found["score_gradient"].sum(axis=1))
    assert (rows <= 1e-14 * size(head)).all()
    mean = np.abs((found["weight"] * found["advantage"]).sum(axis=1))
    assert (mean <= 1e-14 * size(head)).all()


@given(heads())
def test_usage_counts_the_queries_that_look_somewhere(head):
    seeing = head[1].any(axis=1).sum()
    found = laws_of(*head)
    assert float(found["usage"].sum()) == pytest.approx(seeing, abs=1e-12)
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
    score = np.round(score * 64) / 64  # so that adding a whole number is exact
    shifted = score + constants[: len(score), None]
    found = laws_of(score, mask, value, upstream)
    moved = laws_of(shifted, mask, value, upstream)
    for name, array in found.items():
        np.testing.assert_array_equal(moved[name], array, err_msg=name)


@given(heads())
def test_motions_keep_what_they_must(head):
    found = laws_of(*head)
    motion = laws.score_motion(found["weight"], found["advantage"], 0.5)
    moved = laws.weight_motion(found["weight"], motion)
    assert (np.abs(motion.sum(axis=1)) <= 1e-14 * size(head)).all()
    assert (np.abs(moved.sum(axis=1)) <= 1e-14 * size(head)).all()
    change = laws.descent_loss_change(found["score_gradient"], 0.5)
    assert change <= 0
    np.testing.assert_allclose(
        change, laws.loss_change(found["score_gradient"], motion), rtol=1e-12
    )
    # The kernel says the same as the values themselves.
    upstream = jnp.asarray(head[3])
    values = laws.value_motion(found["weight"], upstream, 0.5)
    np.testing.assert_allclose(
        laws.content_motion(found["weight"], values),
        -0.5 * found["kernel"] @ upstream,
        atol=1e-13 * (np.abs(head[3]).max() + 1e-300),
    )
