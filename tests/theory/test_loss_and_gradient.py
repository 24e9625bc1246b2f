"""`laws.loss_and_gradient`, the laws of one head all at once, against autodiff."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    central_difference,
    random_direction,
    random_mask,
    random_problem,
    relative_error,
)

from jaxattn.algorithms import gradients
from jaxattn.algorithms.em import fix_attention
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses, m_steps, masks

CAUSAL = gradients.Wiring(causal=True)


def dense_loss(params, inputs, targets, mask, weights):
    logit = attention.forward(params, inputs, mask).logit
    return losses.cross_entropy(logit, targets, weights)


by_autodiff = jax.jit(jax.value_and_grad(dense_loss))
by_laws = jax.jit(laws.loss_and_gradient)  # under a traced mask, or none


@functools.cache
def causal_laws(length):
    mask = attention.causal_mask(length)
    return jax.jit(functools.partial(laws.loss_and_gradient, mask=mask))


# The two spaces that b can be computed in: more classes than values, and fewer.
SPACES = {"values": {"num_classes": 6}, "classes": {"num_classes": 2, "bias": False}}


@pytest.mark.parametrize(
    ("length", "kind", "space"),
    [
        (1, "none", "values"),
        (700, "causal", "values"),
        pytest.param(2100, "causal", "values", marks=pytest.mark.slow),
    ]
    + [
        (length, kind, space)
        for length in (13, 257)  # one block; several, the last not full
        for kind in ("none", "causal", "random", "masked")
        for space in SPACES
    ],
)
def test_equals_autodiff(x64, length, kind, space):
    mask = {
        "none": np.ones((length, length), bool),
        "causal": attention.causal_mask(length),
        "random": random_mask(0, length),
        "masked": np.zeros((length, length), bool),
    }[kind]
    weights = np.random.default_rng(0).random(length)
    weights[0] = length == 1
    weights = jnp.asarray(weights) if space == "values" else None
    problem = random_problem(length, length=length, **SPACES[space])
    if kind == "causal":
        found = causal_laws(length)(*problem, weights=weights)
    else:
        found = by_laws(*problem, None if kind == "none" else mask, weights)
    loss, gradient = by_autodiff(*problem, mask, weights)
    assert found[0] == pytest.approx(float(loss), rel=1e-13)
    chex.assert_trees_all_equal_shapes_and_dtypes(found[1], gradient)
    for mine, theirs in zip(*map(jax.tree.leaves, (found[1], gradient)), strict=True):
        atol = 1e-12 * float(np.abs(gradient.w_o).max()) + 1e-15
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=atol)


@pytest.fixture(scope="module")
def causal_300():
    """A problem of several causal blocks, and its loss and gradient."""
    with jax.enable_x64(True):
        problem = random_problem(0, length=300)
        yield problem, causal_laws(300)(*problem)


def test_along_a_direction(x64, causal_300):
    (params, inputs, targets), (_, gradient) = causal_300
    mask = attention.causal_mask(300)
    direction = random_direction(0, params)
    params, direction = jax.tree.map(np.asarray, (params, direction))
    slope = central_difference(
        lambda p: by_autodiff(p, inputs, targets, mask, None)[0], params, direction
    )
    by_hand = sum(np.vdot(g, d) for g, d in zip(gradient, direction, strict=True))
    assert by_hand == pytest.approx(slope, rel=1e-7)


def test_under_vmap_is_one_by_one(x64, causal_300):
    problems = [causal_300[0], *(random_problem(seed, length=300) for seed in (1, 2))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    together = jax.jit(jax.vmap(causal_laws(300)))(*stacked)
    for index, problem in enumerate(problems):
        one = jax.tree.map(lambda leaf, n=index: np.asarray(leaf)[n], together)
        assert relative_error(one, causal_laws(300)(*problem)) < 1e-13


def test_a_traced_causal_mask_is_honoured_too(x64, causal_300):
    problem, known = causal_300
    traced = by_laws(*problem, attention.causal_mask(300), None)
    assert relative_error(traced, known) < 1e-13


def test_a_planted_fault_in_the_blocks_shows(x64, causal_300, monkeypatch):
    problem, known = causal_300
    mask = random_mask(0, 300)
    autodiff = by_autodiff(*problem, attention.causal_mask(300), None)
    assert relative_error(known, autodiff) < 1e-12
    monkeypatch.setattr(masks, "is_causal", lambda mask: True)
    forgotten = jax.jit(lambda *p: laws.loss_and_gradient(*p, mask))(*problem)
    assert relative_error(forgotten, by_autodiff(*problem, mask, None)) > 1e-3


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_in_float32(scale):
    """Scores up to 1e5, nearly one-hot rows: still finite, and close to float64."""
    params, inputs, targets = random_problem(0, length=300, dtype=np.float32)
    params = params._replace(w_q=params.w_q * scale)
    single = causal_laws(300)(params, inputs, targets)
    chex.assert_tree_all_finite(single)
    chex.assert_type(jax.tree.leaves(single), jnp.float32)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), (params, inputs))
        double = causal_laws(300)(*wide, jnp.asarray(targets, jnp.int64))
    # Scores of size s are known to s * 6e-8, and so are the weights, relatively.
    tolerance = 1e-5 * max(1.0, scale)
    for name in params._fields:
        actual, expected = getattr(single[1], name), getattr(double[1], name)
        assert relative_error(actual, expected) < tolerance, name


def test_float32_stays_float32_under_x64(x64):
    problem = random_problem(0, dtype=np.float32)
    mask = attention.causal_mask(len(problem[1]))
    of_laws = jax.eval_shape(lambda *p: laws.loss_and_gradient(*p, mask), *problem)
    of_readout = jax.eval_shape(attention.readout, *problem[:2])
    chex.assert_type(jax.tree.leaves((of_laws, of_readout)), jnp.float32)


def test_memory_of_a_long_causal_step():
    """Less than one T x T array, where dense autodiff has several."""
    length = 2000
    params, inputs, targets = random_problem(0, length=length, dtype=np.float32)
    batch = Batch(inputs, targets)

    def temporary(gradient):
        step = jax.jit(functools.partial(gradient, wiring=CAUSAL))
        return step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    square = 4 * length**2
    assert temporary(gradients.by_laws) < square / 2
    assert temporary(gradients.by_autodiff) > square


# --- position weights, padding and faults, on every route

LENGTH = 12


@functools.cache
def routes():
    """Every route to a loss and its gradient, of a causal head."""
    mask = attention.causal_mask(LENGTH)

    def m_step(params, batch):
        fixed, _ = fix_attention(params, batch, gradients.causal_mix)
        found = m_steps.signals(params, fixed)
        return found.loss, found.value_gradient

    def of_batch(function):
        return lambda params, batch: function(
            params, batch.inputs, batch.targets, mask, batch.weights
        )

    found = {
        "laws": of_batch(laws.loss_and_gradient),
        "autodiff": of_batch(jax.value_and_grad(dense_loss)),
        "m_step": m_step,
    }
    for name, gradient in gradients.GRADIENTS.items():
        found[f"by_{name}"] = functools.partial(gradient, wiring=CAUSAL)
    return {name: jax.jit(route) for name, route in found.items()}


@pytest.mark.parametrize("fault", ["target -1", "target C", "weight -1"])
def test_a_fault_makes_nan_of_loss_and_gradient_on_every_route(fault):
    params, inputs, targets = random_problem(0, length=LENGTH, dtype=np.float32)
    weights, targets = np.ones(LENGTH, np.float32), np.array(targets)
    if fault == "weight -1":
        weights[3] = -1
    else:
        targets[3] = -1 if fault == "target -1" else 6
    for name, route in routes().items():
        for leaf in jax.tree.leaves(route(params, Batch(inputs, targets, weights))):
            assert np.isnan(leaf).any(), name


def test_padding_without_weight_is_never_read_on_any_route():
    params, inputs, targets = random_problem(0, length=LENGTH, dtype=np.float32)
    padding = np.arange(LENGTH) >= 8
    clean = Batch(inputs, np.asarray(targets), (~padding).astype(np.float32))
    padded = clean._replace(targets=np.where(padding, np.int32(-1), clean.targets))
    unread = np.where(padding[:, None], np.float32(np.nan), inputs)
    for name, route in routes().items():
        batches = [padded]
        if name in ("laws", "by_laws"):  # the others read inputs without a weight
            batches.append(padded._replace(inputs=unread))
        wanted = jax.tree.leaves(route(params, clean))
        for batch in batches:
            found = jax.tree.leaves(route(params, batch))
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=name)


def test_weights_of_one_are_none_also_with_padding():
    params, inputs, targets = random_problem(0, length=LENGTH, dtype=np.float32)
    mask = np.tri(LENGTH, dtype=bool)
    mask[8:] = False
    padded = np.array(inputs)
    padded[8:] = np.nan
    found = [
        by_laws(params, padded, targets, mask, weights)
        for weights in (None, np.ones(LENGTH, np.float32))
    ]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
