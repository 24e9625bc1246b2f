"""Masks: the causal one is recognised, and unused inputs are never read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_problem

from jaxattn.theory import attention, masks


def test_causal_mask_is_recognised_even_inside_jit():
    found = []

    @jax.jit
    def function(traced_mask):
        found.append(masks.is_causal(masks.causal_mask(5)))
        found.append(masks.is_causal(traced_mask))
        return traced_mask

    function(masks.causal_mask(5))
    assert found == [True, False]
    assert not masks.is_causal(None)
    assert not masks.is_causal(np.ones((5, 5), bool))
    assert not masks.is_causal(masks.causal_mask(5).T)


@pytest.mark.parametrize("causal", [True, False])
def test_inputs_are_used_by_queries_that_count_and_by_their_sources(causal):
    mask = masks.causal_mask(5) if causal else np.eye(5, dtype=bool)
    mask = mask if causal else mask | (np.arange(5) == 1)[None]
    share = jnp.asarray([0.5, 0, 0.5, 0, 0])
    inputs = np.full((5, 2), np.nan, np.float32)
    used = np.isnan(masks.only_used(inputs, mask, share)).all(axis=1)
    wanted = [True, True, True, False, False]  # j = 1: as a source of 2, or of all
    np.testing.assert_array_equal(used, wanted)
    finite = np.ones((5, 2), np.float32)
    np.testing.assert_array_equal(masks.only_used(finite, mask, share), finite)


def test_without_shares_a_fully_masked_row_does_not_count():
    mask = np.zeros((3, 3), bool)
    mask[1, 0] = True
    inputs = np.full((3, 2), np.inf, np.float32)
    used = np.isinf(masks.only_used(inputs, mask)).all(axis=1)
    np.testing.assert_array_equal(used, [True, True, False])


@pytest.fixture(scope="module", params=[attention.forward, attention.readout])
def padded_run(request):
    """Value, result and gradients under a mask without the last four positions."""
    mask = np.tri(12, dtype=bool)
    mask[8:] = False

    def total(params, inputs):
        result = request.param(params, inputs, mask)
        return jnp.sum(jnp.sin(result.logit)), result

    with jax.enable_x64(True):
        yield jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_padding_is_never_read(x64, padded_run, number):
    params, inputs, _ = random_problem(0)
    run = functools.partial(padded_run, params)
    results = run(inputs.at[8:].set(number)), run(inputs.at[8:].set(0))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
