"""How far the first order reaches: the remainder's slope, and shares of real steps."""

import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.algorithms.base import Algorithm, GradientFunction, State
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws
from jaxattn.theory.attention import Params

# At the largest rate the third and fourth orders are at most this share of the second.
_HIGHER_ORDERS = 0.02


class Descent(NamedTuple):
    """Some coordinates θ of a head: the gradient there, and what a step does."""

    gradient: chex.ArrayTree  # ∂L/∂θ, by the laws
    actual: Callable[[chex.ArrayTree], jax.Array]  # dθ -> L(θ + dθ) - L(θ)


class Reach(NamedTuple):
    """How the remainder of a step grows with its rate."""

    rate: jax.Array  # η (K,)
    remainder: jax.Array  # R(η) (K,), nats
    slope: jax.Array  # of log |R| against log η; 2 if the first order is right


class Trace(NamedTuple):
    """A training run, step by step: what the first order promised, and what came."""

    promised: jax.Array  # Σ ⟨∂L/∂θ, dθ⟩ (steps,), nats
    actual: jax.Array  # L(θ + dθ) - L(θ) (steps,), nats


class Traces(NamedTuple):
    """The same steps, seen from two sequences."""

    own: Trace  # the sequences that the step was taken on
    heldout: Trace  # one that no step is taken on


def free_scores(params: Params, inputs: jax.Array, targets: jax.Array, mask) -> Descent:
    """The scores s (T, T) of a head, as if they were free.

    Args:
      params: of the head.
      inputs: x (T, d_x).
      targets: class indices (T,).
      mask: boolean (T, T) or None.

    Returns:
      Descent.
    """
    f = attention.forward(params, inputs, mask)
    advantage = laws.advantage(
        f.weight, laws.compatibility(_upstream(params, f, targets), f.value)
    )

    def actual(score_change: jax.Array) -> jax.Array:
        context_change = _weight_change(f.weight, score_change) @ f.value
        return _loss_change(f.logit, context_change @ params.w_o, targets)

    return Descent(laws.score_gradient(f.weight, advantage), actual)


def free_values(params: Params, inputs: jax.Array, targets: jax.Array, mask) -> Descent:
    """The values v (T, d_v) of a head, as if they were free; see `free_scores`."""
    f = attention.forward(params, inputs, mask)

    def actual(value_change: jax.Array) -> jax.Array:
        context_change = f.weight @ value_change
        return _loss_change(f.logit, context_change @ params.w_o, targets)

    upstream = _upstream(params, f, targets)
    return Descent(laws.value_gradient(f.weight, upstream), actual)


def projections(params: Params, inputs: jax.Array, targets: jax.Array, mask) -> Descent:
    """The parameters of a head, all of them; see `free_scores`."""
    f = attention.forward(params, inputs, mask)

    def actual(change: Params) -> jax.Array:
        query, key = inputs @ change.w_q, inputs @ change.w_k
        product = query @ (f.key + key).T + f.query @ key.T
        weight = _weight_change(f.weight, product / math.sqrt(query.shape[1]))
        value = inputs @ change.w_v
        context = weight @ (f.value + value) + f.weight @ value
        logit = context @ (params.w_o + change.w_o) + f.context @ change.w_o
        if change.b_o is not None:
            logit = logit + change.b_o[None]
        return _loss_change(f.logit, logit, targets)

    _, gradient = laws.loss_and_gradient(params, inputs, targets, mask)
    return Descent(gradient, actual)


COORDINATES = {
    "scores": free_scores,
    "values": free_values,
    "projections": projections,
}


def reach(
    descent: Descent, motion: chex.ArrayTree, *, decades: float, number: int
) -> Reach:
    """Fits the order of the remainder of a step.

    R(η) = L(θ + η d) - L(θ) - η ⟨∂L/∂θ, d⟩, fitted as log |R| = slope log η + const

    The largest rate is where the third or fourth order, by autodiff, is 2 % of the
    second.

    Args:
      descent: see `COORDINATES`. In float32 rounding hides small remainders.
      motion: d; gradient descent is -∂L/∂θ. Along it alone a gradient that lacks some
        directions altogether would pass: try a random one too.
      decades: of rates, downwards from the largest.
      number: how many rates, at least 2.

    Returns:
      Reach; the slope is NaN if the loss is linear, or constant, along the motion.
    """

    def step(rate: jax.Array) -> chex.ArrayTree:
        return jax.tree.map(lambda d: rate * d, motion)

    def along(rate: jax.Array) -> jax.Array:
        return descent.actual(step(rate))

    def function(rate: jax.Array) -> tuple:
        return (along(rate),)

    for _ in range(4):
        function = _with_derivative(function)
    derivatives = function(jnp.zeros((), jax.tree.leaves(motion)[0].dtype))
    second, third, fourth = (
        jnp.abs(derivatives[order]) / math.factorial(order) for order in (2, 3, 4)
    )
    largest = jnp.minimum(
        _HIGHER_ORDERS * second / third, jnp.sqrt(_HIGHER_ORDERS * second / fourth)
    )
    rate = largest * jnp.logspace(-decades, 0, number, dtype=largest.dtype)
    remainder = jax.lax.map(
        lambda rate: laws.remainder(along(rate), descent.gradient, step(rate)), rate
    )
    x, y = jnp.log(rate), jnp.log(jnp.abs(remainder))
    x, y = x - jnp.mean(x), y - jnp.mean(y)
    return Reach(rate, remainder, jnp.vdot(x, y) / jnp.vdot(x, x))


def follow(
    algorithm: Algorithm,
    loss_and_gradient: GradientFunction,
    params: Params,
    sample: Callable[[jax.Array], Batch],
    heldout: Batch,
    *,
    steps: int,
    key: jax.Array,
) -> Traces:
    """Trains, and compares each step with what the first order promised of it.

    dL = Σ ⟨∂L/∂θ, dθ⟩ for whatever dθ the algorithm made: momentum, Adam, or a step
    taken on another sequence.

    Args:
      algorithm: how parameters move.
      loss_and_gradient: of one sequence.
      params: where to start.
      sample: step number -> the sequence to train on.
      heldout: a sequence to judge by.
      steps: how many.
      key: random key of the steps.

    Returns:
      Traces.
    """

    def one(state: State, index: jax.Array) -> tuple[State, Traces]:
        batch = sample(index)
        after, _ = algorithm.step(state, batch, jax.random.fold_in(key, index))
        motion = jax.tree.map(jnp.subtract, after.params, state.params)

        def trace(sequence: Batch) -> Trace:
            loss, gradient = loss_and_gradient(state.params, sequence)
            moved, _ = loss_and_gradient(after.params, sequence)
            return Trace(laws.loss_change(gradient, motion), moved - loss)

        # One after another, so that they are compiled once.
        both = jax.lax.map(trace, jax.tree.map(lambda *x: jnp.stack(x), batch, heldout))
        return after, Traces(*(jax.tree.map(lambda x, n=n: x[n], both) for n in (0, 1)))

    return jax.lax.scan(one, algorithm.init(params), jnp.arange(steps))[1]


def _upstream(params: Params, f: attention.Forward, targets: jax.Array) -> jax.Array:
    return laws.upstream_gradient(laws.logit_gradient(f.logit, targets), params.w_o)


# Finite changes, exact, without the difference of two numbers that are nearly equal: so
# a loss change is known to as many digits as the step, however small that is.


def _weight_change(weight: jax.Array, score_change: jax.Array) -> jax.Array:
    """Gives a' - a = a (e - ē) / (1 + ē), with e = exp(ds) - 1, ē_i = Σ_j a_ij e_ij."""
    grown = jnp.expm1(score_change)
    mean = jnp.sum(weight * grown, axis=1, keepdims=True)
    return weight * (grown - mean) / (1 + mean)


def _loss_change(
    logit: jax.Array, logit_change: jax.Array, targets: jax.Array
) -> jax.Array:
    """Gives L' - L = mean_i (log Σ_c p_ic exp(dl_ic) - dl_i,y_i)."""
    grown = jnp.sum(jax.nn.softmax(logit) * jnp.expm1(logit_change), axis=1)
    of_target = jnp.take_along_axis(logit_change, targets[:, None], axis=1)[:, 0]
    return jnp.mean(jnp.log1p(grown) - of_target)


def _with_derivative(function: Callable) -> Callable:
    """A function's values f, f', ... and the derivative of the last of them."""

    def further(x: jax.Array) -> tuple:
        values, slopes = jax.jvp(function, (x,), (jnp.ones_like(x),))
        return *values, slopes[-1]

    return further
