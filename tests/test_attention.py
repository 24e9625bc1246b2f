"""The forward pass, dense and in row blocks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_mask, random_problem

from jaxattn.theory import attention

# One block, one block exactly, several groups, several blocks a group.
LENGTHS = (1, 7, 257, 700, 2100)


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


def some_mask(kind, length):
    return {
        "none": None,
        "causal": attention.causal_mask(length),
        "random": random_mask(0, length),
    }[kind]


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
    mask = some_mask(kind, len(inputs))
    forward = attention.forward(params, inputs, mask)
    weight, context, logit = naive_forward(params, inputs, mask)
    np.testing.assert_allclose(forward.weight, weight, atol=1e-14)
    np.testing.assert_allclose(forward.context, context, atol=1e-13)
    np.testing.assert_allclose(forward.logit, logit, atol=1e-13)


def test_row_that_sees_nothing_has_zero_weight_and_context(x64):
    params, inputs, _ = random_problem(1)
    mask = random_mask(0, len(inputs))
    blind = ~mask.any(axis=1)
    assert blind.sum() >= 3
    forward = attention.forward(params, inputs, mask)
    np.testing.assert_array_equal(forward.weight[blind], 0)
    np.testing.assert_array_equal(forward.context[blind], 0)
    np.testing.assert_allclose(forward.weight.sum(axis=1), ~blind, atol=1e-14)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["none", "causal", "random"])
def test_readout_equals_forward(x64, kind, length):
    params, inputs, _ = random_problem(length, length=length)
    mask = some_mask(kind, length)
    readout = jax.jit(lambda p, x: attention.readout(p, x, mask))(params, inputs)
    forward = attention.forward(params, inputs, mask)
    np.testing.assert_allclose(readout.logit, forward.logit, atol=1e-12)
    weight = np.asarray(forward.weight)
    log_weight = np.log(weight, out=np.zeros_like(weight), where=weight > 0)
    entropy = -np.sum(weight * log_weight, axis=1)
    np.testing.assert_allclose(readout.attention_entropy, entropy, atol=1e-12)


def test_readout_of_huge_scores_is_one_hot(x64):
    params, inputs, _ = random_problem(0)
    params = params._replace(w_q=params.w_q * 1e4)
    readout = attention.readout(params, inputs)
    forward = attention.forward(params, inputs)
    assert np.abs(forward.score).max() > 1e4
    np.testing.assert_allclose(readout.logit, forward.logit, atol=1e-9)
    np.testing.assert_allclose(readout.attention_entropy, 0, atol=1e-9)


def test_causal_head_does_not_see_the_future(x64):
    params, inputs, _ = random_problem(0, length=300)
    mask = attention.causal_mask(300)
    for function in (attention.forward, attention.readout):
        jacobian = jax.jacrev(
            lambda x, f=function: jnp.sum(f(params, x, mask).logit[150])
        )(inputs)
        assert np.abs(jacobian[:151]).max() > 0
        np.testing.assert_array_equal(jacobian[151:], 0)


def test_causal_mask_is_recognised_even_inside_jit():
    seen = []

    @jax.jit
    def function(traced_mask):
        seen.append(attention.is_causal(attention.causal_mask(5)))
        seen.append(attention.is_causal(traced_mask))
        return traced_mask

    function(attention.causal_mask(5))
    assert seen == [True, False]
    assert not attention.is_causal(None)
    assert not attention.is_causal(np.ones((5, 5), bool))
    assert not attention.is_causal(attention.causal_mask(5).T)


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


def test_scores_with_a_bias_and_other_sources(x64):
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(4, 3)), rng.normal(size=(6, 3))
    expected = query @ key.T / 3**0.5
    for shape in ((4, 6), (1, 6), (4, 1), (1, 1)):
        bias = rng.normal(size=shape)
        found = attention.scores(jnp.asarray(query), jnp.asarray(key), bias)
        np.testing.assert_allclose(found, expected + bias, rtol=1e-13)
    found = attention.scores(jnp.asarray(query), jnp.asarray(key))
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    with pytest.raises(AssertionError):
        attention.scores(jnp.asarray(query), jnp.asarray(key), rng.normal(size=(6, 4)))


def test_a_bias_of_minus_infinity_is_a_mask(x64):
    score = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6)))
    mask = random_mask(0, 6)[:5]
    assert not mask.any(axis=1).all()
    masked = attention.weights(score, mask)
    ruled_out = attention.weights(jnp.where(mask, score, -jnp.inf))
    np.testing.assert_array_equal(ruled_out, masked)

    def signal(bias):
        return jnp.sum(attention.weights(score + bias) ** 2)

    slope = jax.grad(signal)(jnp.where(mask, 0.0, -jnp.inf))
    assert np.isfinite(slope).all()
    np.testing.assert_array_equal(np.asarray(slope)[~mask], 0)


def test_a_nan_score_is_not_hidden():
    weight = attention.weights(jnp.array([[0.0, jnp.nan], [0.0, 1.0]]))
    assert np.isnan(weight[0]).all()
    assert np.isfinite(weight[1]).all()


def test_attention_entropy(x64):
    weight = jnp.array([[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0], [0.2, 0.3, 0.5]])
    expected = [np.log(2), 0, 0, -sum(p * np.log(p) for p in (0.2, 0.3, 0.5))]
    np.testing.assert_allclose(
        attention.attention_entropy(weight), expected, rtol=1e-14
    )
    slope = jax.grad(lambda a: attention.attention_entropy(a).sum())(weight)
    np.testing.assert_array_equal(np.asarray(slope)[2], 0)
    assert slope[3, 0] == pytest.approx(-1 - np.log(0.2))
    assert not np.signbit(attention.attention_entropy(weight)[:3]).any()
    hidden = attention.attention_entropy(jnp.array([[0, jnp.nan], [0.5, 0.5]]))
    np.testing.assert_array_equal(np.isnan(hidden), [True, False])


def test_attention_entropy_is_that_of_readout(x64):
    params, inputs, _ = random_problem(0)
    mask = random_mask(0, 12)
    by_blocks = attention.readout(params, inputs, mask).attention_entropy
    weight = attention.forward(params, inputs, mask).weight
    np.testing.assert_allclose(
        attention.attention_entropy(weight), by_blocks, atol=1e-13
    )
    # Where nothing is allowed the entropy is 0, and so is its slope.
    blind = np.zeros((12, 12), bool)

    def entropy(params):
        return attention.readout(params, inputs, blind).attention_entropy.sum()

    assert entropy(params) == 0
    for leaf in jax.tree.leaves(jax.grad(entropy)(params)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("width", [1, 2, 7])
def test_layer_norm_is_the_librarys(x64, width):
    value = jnp.asarray(np.random.default_rng(0).normal(size=(5, width)) * 3 + 2)
    found = attention.layer_norm(value, 1e-5)
    np.testing.assert_allclose(
        found, jax.nn.standardize(value, epsilon=1e-5), atol=1e-12
    )
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-12)


def test_heads_are_split_and_repeated():
    side_by_side = jnp.arange(12).reshape(2, 6)
    heads = attention.split_heads(side_by_side, 3)
    np.testing.assert_array_equal(heads[0], [[0, 1], [2, 3], [4, 5]])
    repeated = attention.repeat_heads(heads, 6)
    for head in range(6):
        np.testing.assert_array_equal(repeated[:, head], heads[:, head // 2])
    with pytest.raises(AssertionError):
        attention.split_heads(side_by_side, 4)
    with pytest.raises(AssertionError):
        attention.repeat_heads(heads, 4)


@pytest.mark.parametrize("size", ["d_x", "d_k", "d_v", "num_classes"])
def test_a_head_of_no_size(size):
    sizes = {"d_x": 3, "d_k": 2, "d_v": 2, "num_classes": 4}
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=rf"{size}={wrong}: allowed: a whole"):
            attention.init_params(jax.random.key(0), **sizes | {size: wrong})


@pytest.mark.parametrize("length", [0, -1, 2.5, True])
def test_a_mask_of_no_length(length):
    with pytest.raises(ValueError, match=f"length={length}: allowed: a whole number"):
        attention.causal_mask(length)


def test_no_positions_and_no_heads_are_named():
    params, inputs, _ = random_problem(0, dtype=np.float32)
    with pytest.raises(ValueError, match=r"inputs \(0, 5\).*: allowed: no empty axis"):
        attention.forward(params, inputs[:0])
    with pytest.raises(ValueError, match="num_heads=0: allowed: a whole number"):
        attention.split_heads(inputs, 0)
    with pytest.raises(ValueError, match="=0: allowed: a whole number"):
        attention.repeat_heads(jnp.zeros((4, 0, 3)), 2)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_padding_is_never_read(x64, number):
    params, inputs, _ = random_problem(0)
    mask = np.tri(12, dtype=bool)
    mask[8:] = False
    inputs = inputs.at[8:].set(0)
    padded = inputs.at[8:].set(number)

    def total(function, params, inputs):
        result = function(params, inputs, mask)
        return jnp.sum(jnp.sin(result.logit)), result

    for function in (attention.forward, attention.readout):
        run = functools.partial(
            jax.value_and_grad(total, (1, 2), has_aux=True), function, params
        )
        results = map(jax.tree.leaves, (run(padded), run(inputs)))
        for one, other in zip(*results, strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("function", [attention.forward, attention.readout])
@pytest.mark.parametrize("length", [12, 400])
def test_a_query_is_a_matter_of_what_it_may_look_at(function, length):
    params, inputs, _ = random_problem(0, length=length, dtype=np.float32)
    mask = attention.causal_mask(length)
    spoilt = function(params, inputs.at[7].set(jnp.nan), mask).logit
    whole = function(params, inputs, mask).logit
    np.testing.assert_array_equal(spoilt[:7], whole[:7])
    assert np.isnan(spoilt[7:]).all()


def test_a_bias_of_minus_infinity_rules_out_what_is_no_number(x64):
    query, key = np.ones((3, 2)), np.array([[1.0, 2.0], [np.nan, 1.0]])
    score = attention.scores(query, key, np.array([[0.0, -np.inf]]))
    np.testing.assert_array_equal(score[:, 1], -np.inf)
    np.testing.assert_array_equal(attention.weights(score), [[1, 0]] * 3)
