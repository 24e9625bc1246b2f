"""What is seen of a head along its way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_problem

from jaxattn.measures import trajectory
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses

LENGTH = 9


def trail_of(params, steps, seed=0, scale=0.3):
    """Weights that wander off from the first."""
    rng = np.random.default_rng(seed)

    def path(leaf):
        moves = rng.normal(size=(steps, *leaf.shape)) * scale
        return leaf[None] + jnp.asarray(
            np.cumsum(moves, axis=0) - moves[:1], leaf.dtype
        )

    return jax.tree.map(path, params)


@functools.partial(jax.jit, static_argnames="value_norm")
def look(trail, batch, value_norm=False):
    mask, key = attention.causal_mask(LENGTH), jax.random.key(0)
    return trajectory.retrace(trail, batch, mask, key, value_norm=value_norm)


@pytest.mark.parametrize("value_norm", [False, True])
def test_gradients_are_those_of_each_query_s_own_loss(value_norm):
    """Against autodiff of the summed losses, with scores and values set free."""
    params, inputs, targets = random_problem(3, length=LENGTH, dtype=np.float32)
    weights = jnp.arange(1.0, LENGTH + 1)
    batch = Batch(inputs, targets, weights)
    trail = trail_of(params, 4)
    seen = look(trail, batch, value_norm)
    assert set(seen.curves) == set(trajectory.CURVES)
    assert set(seen.traits) == set(trajectory.TRAITS)
    mask = attention.causal_mask(LENGTH)
    at = jax.tree.map(lambda leaf: leaf[jnp.array([0, 3])], trail)
    pictured = trajectory.snapshots(at, batch, mask, value_norm=value_norm)
    assert set(pictured) == set(trajectory.SNAPSHOTS)
    for place, index in enumerate((0, 3)):
        now = jax.tree.map(lambda leaf, i=index: leaf[i], trail)
        f = attention.forward(now, inputs, mask, value_norm=value_norm)

        def summed(score, value, now=now):
            context = attention.weights(score, mask) @ value
            logit = attention.read_out(now, context)
            return LENGTH * losses.cross_entropy(logit, targets, weights)

        by_score, by_value = jax.grad(summed, (0, 1))(f.score, f.value)
        expected = {
            "score_gradient": jnp.sum(jnp.abs(by_score)) / LENGTH,
            "value_gradient": jnp.mean(jnp.linalg.norm(by_value, axis=1)),
        }
        for name, value in expected.items():
            assert seen.curves[name][index] == pytest.approx(float(value), rel=1e-4)
        kept = {name: array[place] for name, array in pictured.items()}
        advantage = laws.advantage(
            kept["attention"], laws.compatibility(kept["upstream"], kept["value"])
        )
        of_snapshot = laws.score_gradient(kept["attention"], advantage)
        np.testing.assert_allclose(of_snapshot, by_score, atol=2e-5)
    force = seen.curves["gate"] * seen.curves["advantage_spread"]
    np.testing.assert_allclose(force, seen.curves["score_gradient"], rtol=1e-5)
    assert seen.curves["attention_drift"][-1] == 0
    assert (seen.curves["attention_drift"][:-1] > 0).all()


def test_values_that_all_move_one_way_have_one_axis_and_walks_have_more():
    params, inputs, targets = random_problem(0, length=LENGTH, d_v=6, dtype=np.float32)
    ones = jnp.ones((1, *params.w_v.shape))
    one_way = jnp.linspace(0.0, 1.0, 20)[:, None, None] * ones
    still = jax.tree.map(lambda leaf: jnp.stack([leaf] * 20), params)
    moving = still._replace(w_v=still.w_v + one_way)
    traits = look(moving, Batch(inputs, targets)).traits
    assert traits["path_share"] == pytest.approx(1, abs=1e-5)
    assert 2 / 6 < traits["walk_share"] < 0.9
    assert 2 / 6 < traits["readout_walk_share"] < 0.95
    # Two classes pull along one direction, whatever they pull.
    of_two = moving._replace(w_o=moving.w_o[..., :2], b_o=moving.b_o[..., :2])
    traits = look(of_two, Batch(inputs, targets % 2)).traits
    assert traits["readout_walk_share"] == pytest.approx(1, abs=1e-5)
    assert traits["walk_share"] < 0.9
    found = look(still, Batch(inputs, targets))
    assert all(np.isnan(value) for value in found.traits.values())  # nothing moved
    assert (found.curves["attention_drift"] == 0).all()


def test_what_has_no_answer_is_nan_and_the_rest_is_not():
    params, inputs, targets = random_problem(0, length=LENGTH, dtype=np.float32)
    nothing = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape)), params)
    curves = look(nothing, Batch(inputs, targets)).curves
    unknown = {name for name, curve in curves.items() if np.isnan(curve).any()}
    assert unknown == {
        *("gate", "specialisation", "key_orthogonality", "key_cosine"),
        *("query_key_alignment", "value_dimension"),
    }
    np.testing.assert_allclose(curves["relative_entropy"], 1, atol=1e-6)
    # Equal shares are equal use, though a causal mask lets none but one see the last.
    np.testing.assert_allclose(curves["usage_entropy"], 1, atol=1e-6)
    np.testing.assert_allclose(curves["usage_gini"], 0, atol=1e-6)
    lost = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), nothing)
    curves = look(lost, Batch(inputs, targets)).curves
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
