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

pytestmark = pytest.mark.usefixtures("x64")


def loss_in(coordinates, params, inputs, targets, mask):
    """The point in these coordinates, and the loss as a plain function of it."""
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
    }[coordinates]


def head(seed, **more):
    return *random_problem(seed, **more), random_mask(seed, 12)


@pytest.mark.parametrize(
    ("coordinates", "bias"),
    [("scores", True), ("values", True), ("projections", True), ("projections", False)],
)
def test_the_gradient_and_finite_changes_are_right(coordinates, bias):
    point_of = jax.jit(lambda *head: loss_in(coordinates, *head)[0])

    @jax.jit
    def compared(change, *head):
        point, loss = loss_in(coordinates, *head)
        descent = first_order.COORDINATES[coordinates](*head)
        moved = jax.tree.map(jnp.add, point, change)
        gradients = descent.gradient, jax.grad(loss)(point)
        return gradients, descent.actual(change), loss(moved) - loss(point)

    for seed in range(2):
        problem = head(seed, bias=bias)
        direction = random_direction(seed, point_of(*problem))
        for size in (1e-3, 1.0):
            change = jax.tree.map(lambda d, s=size: s * d, direction)
            gradients, actual, plain = compared(change, *problem)
            assert relative_error(*gradients) < 1e-12
            assert float(actual) == pytest.approx(float(plain), rel=1e-9, abs=1e-13)


@functools.partial(jax.jit, static_argnames="coordinates")
def slopes_of(coordinates, heads, gradients, motions):
    """Of motions (seeds, ...), given the gradients of the laws (seeds, ...)."""

    def one(head, gradient, motion):
        descent = first_order.COORDINATES[coordinates](*head)
        descent = descent._replace(gradient=gradient)
        return first_order.reach(descent, motion, decades=5, number=11).slope

    return jax.vmap(one)(heads, gradients, motions)


def slopes(coordinates, seeds=3):
    """Along the step of descent and along a random one (2, seeds)."""
    heads = jax.tree.map(lambda *x: np.stack(x), *map(head, range(seeds)))
    # By the laws as they are now, broken or not; the rest is compiled once.
    law = jax.vmap(lambda *head: first_order.COORDINATES[coordinates](*head).gradient)
    gradients = jax.jit(law)(*heads)
    downhill = jax.tree.map(lambda x: -np.asarray(x), gradients)
    random = random_direction(0, gradients)
    found = [slopes_of(coordinates, heads, gradients, m) for m in (downhill, random)]
    return np.array(found)


@pytest.mark.parametrize("coordinates", first_order.COORDINATES)
def test_the_remainder_is_of_second_order(coordinates):
    np.testing.assert_allclose(slopes(coordinates), 2, atol=0.01)


@pytest.mark.parametrize(
    ("coordinates", "law"),
    [
        ("scores", "score_gradient"),
        ("values", "value_gradient"),
        ("projections", "loss_and_gradient"),
    ],
)
def test_one_per_cent_in_the_gradient_is_not_slope_two(monkeypatch, coordinates, law):
    right = getattr(laws, law)
    monkeypatch.setattr(
        laws, law, lambda *xs: jax.tree.map(lambda x: 1.01 * x, right(*xs))
    )
    assert np.all(slopes(coordinates) < 1.7)


def test_a_gradient_without_some_of_its_parts_is_not_slope_two(monkeypatch):
    """Along the step of descent it is: that does not go where they point."""
    right = laws.loss_and_gradient

    def without(*xs):
        loss, gradient = right(*xs)
        return loss, gradient._replace(w_k=jnp.zeros_like(gradient.w_k))

    monkeypatch.setattr(laws, "loss_and_gradient", without)
    downhill, random = slopes("projections")
    np.testing.assert_allclose(downhill, 2, atol=0.01)
    assert np.all(random < 1.5)


def test_a_loss_that_is_linear_has_no_slope():
    descent = first_order.Descent(jnp.ones(2), lambda change: jnp.sum(change))
    reach = jax.jit(lambda d: first_order.reach(descent, d, decades=5, number=5))
    assert np.isnan(reach(jnp.ones(2)).slope)


def test_remainder():
    gradient = (jnp.array([1.0, -2.0]), jnp.array(3.0))
    motion = (jnp.array([0.5, 0.5]), jnp.array(-1.0))
    assert laws.remainder(jnp.array(-3.0), gradient, motion) == pytest.approx(0.5)
    zero = jax.tree.map(jnp.zeros_like, motion)
    assert laws.remainder(jnp.array(0.0), gradient, zero) == 0


def test_follow_compares_each_step_with_its_prediction():
    """Steps on other sequences in turn, each traced on its own and the held-out one."""
    params, *_ = random_problem(0)
    *own, heldout = (Batch(*random_problem(n, length=40)[1:]) for n in range(5))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *own)
    wiring = gradients.Wiring(causal=True)
    gradient = functools.partial(gradients.by_laws, wiring=wiring)
    algorithm = descent.gradient(optax.sgd(1e-4))
    traces = jax.jit(
        lambda params, heldout: first_order.follow(
            algorithm,
            gradient,
            params,
            lambda step: jax.tree.map(lambda leaf: leaf[step], stacked),
            heldout,
            steps=len(own),
            key=jax.random.key(0),
        )
    )(params, heldout)
    step, losses = jax.jit(algorithm.step), jax.jit(gradient)
    state = algorithm.init(params)
    for number, batch in enumerate(own):
        before = state.params
        state, _ = step(state, batch, jax.random.key(0))
        motion = jax.tree.map(lambda a, b: np.asarray(a - b), state.params, before)
        for sequence, trace in ((batch, traces.own), (heldout, traces.heldout)):
            loss, slope = losses(before, sequence)
            moved, _ = losses(state.params, sequence)
            actual = float(moved - loss)
            assert float(trace.actual[number]) == pytest.approx(actual, abs=1e-14)
            predicted = sum(map(np.vdot, slope, motion))
            assert float(trace.predicted[number]) == pytest.approx(predicted, rel=1e-12)
    # On its own sequence the loss change of a small step is -η ‖∂L/∂θ‖².
    np.testing.assert_allclose(traces.own.predicted, traces.own.actual, rtol=1e-2)
    assert (traces.own.predicted < 0).all()
