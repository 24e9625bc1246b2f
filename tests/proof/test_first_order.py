"""How far the first order reaches, and that a wrong first order would show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import random_direction, random_mask, random_problem, relative_error

from jaxattn.algorithms import descent, gradients
from jaxattn.proof import first_order
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses


def losses_of(params, inputs, targets, mask):
    """Coordinates -> their point, and the loss as a plain function of them."""
    f = attention.forward(params, inputs, mask)

    def of_logit(logit):
        return losses.cross_entropy(logit, targets)

    def of_score(score):
        context = attention.weights(score, mask) @ f.value
        return of_logit(attention.read_out(params, context))

    def of_value(value):
        return of_logit(attention.read_out(params, f.weight @ value))

    def of_params(params):
        return of_logit(attention.forward(params, inputs, mask).logit)

    return {
        "scores": (f.score, of_score),
        "values": (f.value, of_value),
        "projections": (params, of_params),
    }


@pytest.mark.parametrize("coordinates", first_order.COORDINATES)
def test_the_gradient_and_finite_changes_are_right(x64, coordinates):
    for seed in range(2):
        problem = (*random_problem(seed, bias=seed > 0), random_mask(seed, 12))
        point, loss = losses_of(*problem)[coordinates]
        descent = first_order.COORDINATES[coordinates](*problem)
        assert relative_error(descent.gradient, jax.grad(loss)(point)) < 1e-12
        for size in (1e-3, 1.0):
            change = jax.tree.map(
                lambda d, s=size: s * d, random_direction(seed, point)
            )
            moved = jax.tree.map(jnp.add, point, change)
            plain = float(loss(moved) - loss(point))
            assert float(descent.actual(change)) == pytest.approx(
                plain, rel=1e-9, abs=1e-13
            )


def slopes(coordinates, seeds):
    """Along the step of descent and a random one (seeds, 2)."""

    def one(seed):
        problem = (*random_problem(seed), random_mask(seed, 12))
        descent = first_order.COORDINATES[coordinates](*problem)
        downhill = jax.tree.map(jnp.negative, descent.gradient)
        random = random_direction(seed, downhill)
        return [
            first_order.reach(descent, motion, decades=5, number=11).slope
            for motion in (downhill, random)
        ]

    return np.array([one(seed) for seed in range(seeds)])


@pytest.mark.parametrize("coordinates", first_order.COORDINATES)
def test_the_remainder_is_of_second_order(x64, coordinates):
    np.testing.assert_allclose(slopes(coordinates, seeds=3), 2, atol=0.01)


@pytest.mark.parametrize(
    ("coordinates", "law"),
    [
        ("scores", "score_gradient"),
        ("values", "value_gradient"),
        ("projections", "loss_and_gradient"),
    ],
)
def test_one_per_cent_in_the_gradient_is_not_slope_two(
    x64, monkeypatch, coordinates, law
):
    right = getattr(laws, law)
    monkeypatch.setattr(
        laws, law, lambda *xs: jax.tree.map(lambda x: 1.01 * x, right(*xs))
    )
    assert np.all(slopes(coordinates, seeds=3) < 1.7)


def test_a_gradient_without_some_of_its_parts_is_not_slope_two(x64, monkeypatch):
    """The step of descent alone could not tell: it does not go where they point."""
    right = laws.loss_and_gradient

    def without(*xs):
        loss, gradient = right(*xs)
        return loss, gradient._replace(w_k=jnp.zeros_like(gradient.w_k))

    monkeypatch.setattr(laws, "loss_and_gradient", without)
    downhill, random = slopes("projections", seeds=2).T
    np.testing.assert_allclose(downhill, 2, atol=0.01)
    assert np.all(random < 1.5)


def test_a_loss_that_is_linear_has_no_slope(x64):
    descent = first_order.Descent(jnp.ones(2), lambda change: jnp.sum(change))
    reach = first_order.reach(descent, jnp.ones(2), decades=5, number=5)
    assert np.isnan(reach.slope)


def test_remainder(x64):
    gradient = (jnp.array([1.0, -2.0]), jnp.array(3.0))
    motion = (jnp.array([0.5, 0.5]), jnp.array(-1.0))
    assert laws.remainder(jnp.array(-3.0), gradient, motion) == pytest.approx(0.5)
    zero = jax.tree.map(jnp.zeros_like, motion)
    assert laws.remainder(jnp.array(0.0), gradient, zero) == 0


def follow(algorithm, params, sample, heldout, steps=5):
    gradient = functools.partial(
        gradients.by_laws, wiring=gradients.Wiring(causal=True)
    )
    return first_order.follow(
        algorithm,
        gradient,
        params,
        sample,
        heldout,
        steps=steps,
        key=jax.random.key(0),
    )


@pytest.mark.slow
def test_follow_compares_each_step_with_its_promise(x64):
    params, inputs, targets = random_problem(0, length=40)
    _, *heldout = random_problem(1, length=40)
    batch, heldout = Batch(inputs, targets), Batch(*heldout)
    algorithm = descent.gradient(optax.sgd(1e-4))
    traces = follow(algorithm, params, lambda step: batch, heldout)

    state = algorithm.init(params)
    for step in range(5):
        before = state.params
        state, _ = algorithm.step(state, batch, jax.random.key(0))
        for sequence, trace in ((batch, traces.own), (heldout, traces.heldout)):
            loss, gradient = gradients.by_laws(
                before, sequence, wiring=gradients.Wiring(causal=True)
            )
            moved, _ = gradients.by_laws(
                state.params, sequence, wiring=gradients.Wiring(causal=True)
            )
            assert float(trace.actual[step]) == pytest.approx(
                float(moved - loss), abs=1e-14
            )
            motion = jax.tree.map(jnp.subtract, state.params, before)
            assert float(trace.promised[step]) == pytest.approx(
                float(laws.loss_change(gradient, motion)), rel=1e-12
            )
    # On its own sequence a small step keeps its promise, -η ‖∂L/∂θ‖².
    np.testing.assert_allclose(traces.own.promised, traces.own.actual, rtol=1e-2)
    assert (traces.own.promised < 0).all()


def test_follow_takes_a_new_sequence_each_step(x64):
    params, *first = random_problem(0, length=40)
    _, *second = random_problem(1, length=40)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), Batch(*first), Batch(*second))
    algorithm = descent.gradient(optax.sgd(1e-2))

    def sample(step):
        return jax.tree.map(lambda leaf: leaf[step], stacked)

    traces = follow(algorithm, params, sample, Batch(*first), steps=2)
    assert float(traces.own.actual[0]) == pytest.approx(
        float(traces.heldout.actual[0]), rel=1e-12
    )
    assert traces.own.actual[1] != traces.heldout.actual[1]
