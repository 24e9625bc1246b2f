"""The forward pass of one head, with all its arrays."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_mask, random_problem

from jaxattn.theory import attention

forward = jax.jit(attention.forward)


def naive_forward(params, inputs, mask):
    """Loops over positions, NumPy, float64."""
    w_q, w_k, w_v, w_o = (np.asarray(w, np.float64) for w in params[:4])
    inputs = np.asarray(inputs, np.float64)
    weight = np.zeros((len(inputs), len(inputs)))
    for i, x in enumerate(inputs):
        allowed = [j for j in range(len(inputs)) if mask is None or mask[i][j]]
        score = [(x @ w_q) @ (inputs[j] @ w_k) / w_q.shape[1] ** 0.5 for j in allowed]
        for j, s in zip(allowed, score, strict=True):
            weight[i, j] = np.exp(s - max(score))
        if allowed:
            weight[i] /= weight[i].sum()
    context = weight @ inputs @ w_v
    return weight, context, context @ w_o + np.asarray(params.b_o, np.float64)


def test_init_params_have_shape_scale_and_dtype():
    params = attention.init_params(
        jax.random.key(0), d_x=300, d_k=40, d_v=50, num_classes=60, scale=0.3, bias=True
    )
    chex.assert_shape(params, [(300, 40), (300, 40), (300, 50), (50, 60), (60,)])
    chex.assert_type(params, jnp.float32)
    assert np.std(params.w_q) == pytest.approx(0.3, rel=0.05)
    assert not np.array_equal(params.w_q, params.w_k)
    np.testing.assert_array_equal(params.b_o, 0)


def test_init_params_without_bias_has_none():
    sizes = {"d_x": 2, "d_k": 2, "d_v": 2, "num_classes": 2}
    assert attention.init_params(jax.random.key(0), **sizes).b_o is None


@pytest.mark.parametrize("kind", ["none", "causal", "random"])
def test_forward_equals_loops(x64, kind):
    params, inputs, _ = random_problem(0)
    mask = {
        "none": None,
        "causal": attention.causal_mask(len(inputs)),
        "random": random_mask(0, len(inputs)),
    }[kind]
    found = forward(params, inputs, mask)
    weight, context, logit = naive_forward(params, inputs, mask)
    np.testing.assert_allclose(found.weight, weight, atol=1e-14)
    np.testing.assert_allclose(found.context, context, atol=1e-13)
    np.testing.assert_allclose(found.logit, logit, atol=1e-13)


def test_a_fully_masked_row_has_zero_weight_and_context(x64):
    params, inputs, _ = random_problem(1)
    mask = random_mask(0, len(inputs))
    masked = ~mask.any(axis=1)
    assert masked.sum() >= 3
    found = jax.tree.map(np.asarray, forward(params, inputs, mask))
    np.testing.assert_array_equal(found.weight[masked], 0)
    np.testing.assert_array_equal(found.context[masked], 0)
    np.testing.assert_allclose(found.weight.sum(axis=1), ~masked, atol=1e-14)


def test_shapes_that_do_not_fit_are_refused():
    params, inputs, _ = random_problem(0, dtype=np.float32)
    with pytest.raises(AssertionError):
        attention.forward(params, inputs[:, :-1])
    with pytest.raises(AssertionError):
        attention.forward(params, inputs, attention.causal_mask(3))
    with pytest.raises(AssertionError):
        attention.forward(params._replace(w_v=params.w_v[:, :-1]), inputs)
    with pytest.raises(AssertionError):
        attention.readout(params, inputs[None])
    with pytest.raises(ValueError, match=r"inputs \(0, 5\).*: must have no empty axis"):
        attention.forward(params, inputs[:0])


def test_scores_with_a_bias_and_other_sources(x64):
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(4, 3)), rng.normal(size=(6, 3))
    expected = query @ key.T / 3**0.5
    for shape in ((4, 6), (1, 6), (4, 1), (1, 1)):
        bias = rng.normal(size=shape)
        found = attention.scores(query, key, bias)
        np.testing.assert_allclose(found, expected + bias, rtol=1e-13)
    np.testing.assert_allclose(attention.scores(query, key), expected, rtol=1e-13)
    with pytest.raises(AssertionError):
        attention.scores(query, key, rng.normal(size=(6, 4)))


def test_a_bias_of_minus_infinity_is_a_mask(x64):
    score = np.random.default_rng(0).normal(size=(5, 6))
    mask = random_mask(0, 6)[:5]
    assert not mask.any(axis=1).all()
    bias = np.where(mask, 0.0, -np.inf)
    np.testing.assert_array_equal(
        attention.weights(score + bias), attention.weights(jnp.asarray(score), mask)
    )

    def signal(bias):
        return jnp.sum(attention.weights(score + bias) ** 2)

    slope = np.asarray(jax.jit(jax.grad(signal))(bias))
    assert np.isfinite(slope).all()
    np.testing.assert_array_equal(slope[~mask], 0)


def test_a_bias_of_minus_infinity_masks_what_is_not_a_number(x64):
    query, key = np.ones((3, 2)), np.array([[1.0, 2.0], [np.nan, 1.0]])
    score = attention.scores(query, key, np.array([[0.0, -np.inf]]))
    np.testing.assert_array_equal(score[:, 1], -np.inf)
    np.testing.assert_array_equal(attention.weights(score), [[1, 0]] * 3)


def test_a_nan_score_shows():
    weight = attention.weights(np.array([[0.0, np.nan], [0.0, 1.0]], np.float32))
    np.testing.assert_array_equal(np.isnan(weight), [[True] * 2, [False] * 2])


def test_attention_entropy(x64):
    weight = jnp.array([[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0], [0.2, 0.3, 0.5]])
    expected = [np.log(2), 0, 0, -sum(p * np.log(p) for p in (0.2, 0.3, 0.5))]
    entropy = np.asarray(attention.attention_entropy(weight))
    np.testing.assert_allclose(entropy, expected, rtol=1e-14)
    slope = jax.grad(lambda a: attention.attention_entropy(a).sum())(weight)
    np.testing.assert_array_equal(np.asarray(slope)[2], 0)
    assert slope[3, 0] == pytest.approx(-1 - np.log(0.2))
    assert not np.signbit(entropy[:3]).any()
    hidden = attention.attention_entropy(np.array([[0, np.nan], [0.5, 0.5]]))
    np.testing.assert_array_equal(np.isnan(hidden), [True, False])


@pytest.mark.parametrize("width", [1, 2, 7])
def test_layer_norm_is_the_librarys(x64, width):
    value = np.random.default_rng(0).normal(size=(5, width)) * 3 + 2
    found = attention.layer_norm(value, 1e-5)
    expected = jax.nn.standardize(value, epsilon=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(np.mean(found, axis=1), 0, atol=1e-12)


def test_heads_are_split_and_repeated():
    side_by_side = np.arange(12).reshape(2, 6)
    heads = attention.split_heads(side_by_side, 3)
    np.testing.assert_array_equal(heads[0], [[0, 1], [2, 3], [4, 5]])
    repeated = np.asarray(attention.repeat_heads(heads, 6))
    for head in range(6):
        np.testing.assert_array_equal(repeated[:, head], heads[:, head // 2])
    with pytest.raises(AssertionError):
        attention.split_heads(side_by_side, 4)
    with pytest.raises(AssertionError):
        attention.repeat_heads(heads, 4)
