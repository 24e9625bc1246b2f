"""`attention.readout`, row block by row block, against the dense forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_mask, random_problem

from jaxattn.theory import attention

forward = jax.jit(attention.forward)


# One block, two groups of blocks, three blocks a group: the last only if causal.
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("none", 1),
        ("none", 300),
        ("random", 7),
        ("random", 300),
        ("causal", 7),
        ("causal", 300),
        ("causal", 2100),
    ],
)
def test_readout_equals_forward(x64, kind, length):
    params, inputs, _ = random_problem(length, length=length)
    mask = {
        "none": np.ones((length, length), bool),
        "causal": attention.causal_mask(length),
        "random": random_mask(0, length),
    }[kind]
    if kind == "random":
        found = jax.jit(attention.readout)(params, inputs, mask)
    else:
        known = None if kind == "none" else mask
        found = jax.jit(lambda p, x: attention.readout(p, x, known))(params, inputs)
    expected = forward(params, inputs, mask)
    np.testing.assert_allclose(found.logit, expected.logit, atol=1e-12)
    weight = np.asarray(expected.weight)
    log_weight = np.log(weight, out=np.zeros_like(weight), where=weight > 0)
    entropy = -np.sum(weight * log_weight, axis=1)
    np.testing.assert_allclose(found.attention_entropy, entropy, atol=1e-12)


def test_readout_of_huge_scores_is_one_hot(x64):
    params, inputs, _ = random_problem(0)
    params = params._replace(w_q=params.w_q * 1e4)
    found = jax.jit(attention.readout)(params, inputs)
    expected = forward(params, inputs)
    assert np.abs(expected.score).max() > 1e4
    np.testing.assert_allclose(found.logit, expected.logit, atol=1e-9)
    np.testing.assert_allclose(found.attention_entropy, 0, atol=1e-9)


def test_the_entropy_of_fully_masked_rows_and_its_slope_are_zero(x64):
    params, inputs, _ = random_problem(0)

    def entropy(params):
        masked = np.zeros((12, 12), bool)
        return attention.readout(params, inputs, masked).attention_entropy.sum()

    value, slope = jax.jit(jax.value_and_grad(entropy))(params)
    assert value == 0
    for leaf in jax.tree.leaves(slope):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("function", [attention.forward, attention.readout])
def test_a_causal_head_does_not_read_the_future(x64, function):
    params, inputs, _ = random_problem(0, length=300)
    mask = attention.causal_mask(300)

    @jax.jit
    @jax.grad
    def slope(inputs):
        return jnp.sum(function(params, inputs, mask).logit[150])

    found = np.asarray(slope(inputs))
    assert np.abs(found[:151]).max() > 0
    np.testing.assert_array_equal(found[151:], 0)


@pytest.mark.parametrize(
    ("function", "length"),
    [(attention.forward, 12), (attention.readout, 12), (attention.readout, 300)],
)
def test_a_query_depends_on_its_unmasked_sources_alone(function, length):
    params, inputs, _ = random_problem(0, length=length, dtype=np.float32)
    mask = attention.causal_mask(length)
    run = jax.jit(lambda x: function(params, x, mask).logit)
    spoilt, clean = run(inputs.at[7].set(jnp.nan)), run(inputs)
    np.testing.assert_array_equal(spoilt[:7], clean[:7])
    assert np.isnan(spoilt[7:]).all()
