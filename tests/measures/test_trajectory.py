"""Diagnostics along a training run, from the weights at every evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_problem

from jaxattn.measures import trajectory
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses

# The same in all tests: each shape is a program of its own.
LENGTH, STEPS, D_V = 9, 20, 6
WEIGHTS = np.arange(1, LENGTH + 1, dtype=np.float32)
problem = functools.partial(random_problem, length=LENGTH, d_v=D_V, dtype=np.float32)


def trail_of(params, seed=0, scale=0.3):
    """Weights that wander off from the first."""
    rng = np.random.default_rng(seed)

    def path(leaf):
        moves = rng.normal(size=(STEPS, *leaf.shape)) * scale
        path = np.asarray(leaf)[None] + np.cumsum(moves, axis=0) - moves[:1]
        return path.astype(np.float32)

    return jax.tree.map(path, params)


@functools.partial(jax.jit, static_argnames="value_norm")
def retrace(trail, batch, value_norm=False):
    mask, key = attention.causal_mask(LENGTH), jax.random.key(0)
    return trajectory.retrace(trail, batch, mask, key, value_norm=value_norm)


@functools.partial(jax.jit, static_argnames="value_norm")
def snapshots(trail, batch, value_norm):
    mask = attention.causal_mask(LENGTH)
    return trajectory.snapshots(trail, batch, mask, value_norm=value_norm)


@functools.partial(jax.jit, static_argnames="value_norm")
def by_autodiff(params, batch, value_norm):
    """Gradients of the summed losses by scores and by values."""
    mask = attention.causal_mask(LENGTH)
    f = attention.forward(params, batch.inputs, mask, value_norm=value_norm)

    def summed(score, value):
        logit = attention.read_out(params, attention.weights(score, mask) @ value)
        return LENGTH * losses.cross_entropy(logit, batch.targets, batch.weights)

    return jax.grad(summed, (0, 1))(f.score, f.value)


@jax.jit
def by_laws(weight, upstream, value):
    advantage = laws.advantage(weight, laws.compatibility(upstream, value))
    return laws.score_gradient(weight, advantage)


@pytest.mark.parametrize("value_norm", [False, True])
def test_gradients_are_those_of_each_query_s_own_loss(value_norm):
    """Against autodiff of the summed losses, by scores and by values."""
    params, inputs, targets = problem(3)
    batch = Batch(inputs, targets, WEIGHTS)
    trail = trail_of(params)
    found = retrace(trail, batch, value_norm)
    assert set(found.curves) == set(trajectory.CURVES)
    assert set(found.traits) == set(trajectory.TRAITS)
    chosen = np.array([0, 3])
    at = jax.tree.map(lambda leaf: leaf[chosen], trail)
    arrays = snapshots(at, batch, value_norm)
    assert set(arrays) == set(trajectory.SNAPSHOTS)
    for place, index in enumerate(chosen):
        now = jax.tree.map(lambda leaf, i=index: leaf[i], trail)
        by_score, by_value = map(np.asarray, by_autodiff(now, batch, value_norm))
        expected = {
            "score_gradient": np.abs(by_score).sum() / LENGTH,
            "value_gradient": np.linalg.norm(by_value, axis=1).mean(),
        }
        for name, value in expected.items():
            assert found.curves[name][index] == pytest.approx(value, rel=1e-4)
        own = {name: array[place] for name, array in arrays.items()}
        of_snapshot = by_laws(own["attention"], own["upstream"], own["value"])
        np.testing.assert_allclose(of_snapshot, by_score, atol=2e-5)
    force = found.curves["gate"] * found.curves["advantage_spread"]
    np.testing.assert_allclose(force, found.curves["score_gradient"], rtol=1e-5)
    drift = np.asarray(found.curves["attention_drift"])
    assert drift[-1] == 0
    assert (drift[:-1] > 0).all()


def test_values_that_all_move_one_way_have_one_axis_and_walks_have_more():
    params, inputs, targets = problem(0)
    batch = Batch(inputs, targets, WEIGHTS)
    fixed = jax.tree.map(lambda leaf: np.stack([leaf] * STEPS), params)
    one_way = np.linspace(0, 1, STEPS, dtype=np.float32)[:, None, None]
    moving = fixed._replace(w_v=fixed.w_v + one_way)
    traits = retrace(moving, batch).traits
    assert traits["path_share"] == pytest.approx(1, abs=1e-5)
    assert 2 / D_V < traits["walk_share"] < 0.9
    assert 2 / D_V < traits["readout_walk_share"] < 0.95
    # Three classes, each twice: a pull sums to zero and so has two directions.
    of_three = np.tile(fixed.w_o[..., :3], 2)
    traits = retrace(moving._replace(w_o=of_three), batch).traits
    assert traits["readout_walk_share"] == pytest.approx(1, abs=1e-5)
    assert traits["walk_share"] < 0.9
    found = retrace(fixed, batch)
    assert all(np.isnan(value) for value in found.traits.values())  # nothing moved
    assert not found.curves["attention_drift"].any()


def test_what_is_undefined_is_nan_and_the_rest_is_not():
    params, inputs, targets = problem(0)
    batch = Batch(inputs, targets, WEIGHTS)
    zeros = jax.tree.map(lambda x: np.zeros((STEPS, *x.shape), np.float32), params)
    curves = retrace(zeros, batch).curves
    undefined = {name for name, curve in curves.items() if np.isnan(curve).any()}
    assert undefined == {
        "gate",
        "specialisation",
        "key_orthogonality",
        "key_cosine",
        "query_key_alignment",
        "value_dimension",
    }
    np.testing.assert_allclose(curves["relative_entropy"], 1, atol=1e-6)
    # Equal shares are equal usage, although the last source has one query alone.
    np.testing.assert_allclose(curves["usage_entropy"], 1, atol=1e-6)
    np.testing.assert_allclose(curves["usage_gini"], 0, atol=1e-6)
    lost = jax.tree.map(np.copy, zeros)
    for leaf in lost:
        leaf[1] = np.nan
    curves = retrace(lost, batch).curves
    assert all(np.isnan(curve[1]) for curve in curves.values())


def test_values_that_stay_but_for_rounding_have_no_axes():
    rng = np.random.default_rng(0)
    at = rng.normal(size=(1, 7, 4))
    jitter = 1 + np.finfo(np.float32).eps * rng.integers(-1, 2, (20, 7, 4))
    w_o = jnp.asarray(rng.normal(size=(20, 4, 3)), jnp.float32)
    shares = jax.jit(trajectory.path_shares)
    still = shares(jnp.asarray(at * jitter, jnp.float32), w_o, jax.random.key(0))
    assert not any(share.valid for share in still)
    assert all(share.value == 0 for share in still)
    slow = at + 1e-5 * np.cumsum(rng.normal(size=(20, 7, 4)), axis=0)
    moving = shares(jnp.asarray(slow, jnp.float32), w_o, jax.random.key(0))
    assert all(share.valid for share in moving)
    assert all(0.5 <= share.value <= 1 for share in moving)
