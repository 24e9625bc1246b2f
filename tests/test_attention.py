"""The forward pass, dense and in row blocks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_mask, random_problem

from jaxattn import attention

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
