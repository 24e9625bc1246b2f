"""Order of the remainder of a step, and what the first order predicts of real steps."""

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
    """Coordinates θ of a head: the gradient, and the loss change of a step."""

    gradient: chex.ArrayTree  # ∂L/∂θ, by the laws
    actual: Callable[[chex.ArrayTree], jax.Array]  # dθ -> L(θ + dθ) - L(θ)


class Reach(NamedTuple):
    """The remainder of a step against its rate."""

    rate: jax.Array  # η (K,)
    remainder: jax.Array  # R(η) (K,), nats
    slope: jax.Array  # of log |R| against log η; 2 if the first order is right


class Trace(NamedTuple):
    """Loss changes of the steps of a training run, predicted and actual."""

    predicted: jax.Array  # Σ ⟨∂L/∂θ, dθ⟩ (steps,), nats
    actual: jax.Array  # L(θ + dθ) - L(θ) (steps,), nats


class Traces(NamedTuple):
    """Loss changes of the same steps on two sequences."""

    own: Trace  # the sequence of the step
    heldout: Trace  # one without steps of its own


def free_scores(params: Params, inputs: jax.Array, targets: jax.Array, mask) -> Descent:
    """Takes the scores s (T, T) of a head as free coordinates.

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
    """Takes the values v (T, d_v) of a head as free coordinates; see `free_scores`."""
    f = attention.forward(params, inputs, mask)

    def actual(value_change: jax.Array) -> jax.Array:
        context_change = f.weight @ value_change
        return _loss_change(f.logit, context_change @ params.w_o, targets)

    upstream = _upstream(params, f, targets)
    return Descent(laws.value_gradient(f.weight, upstream), actual)


def projections(params: Params, inputs: jax.Array, targets: jax.Array, mask) -> Descent:
    """Takes all parameters of a head as coordinates; see `free_scores`."""
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
      motion: d; gradient descent is -∂L/∂θ. It does not test directions that the
        gradient lacks altogether: test a random direction, too.
      decades: of rates, down from the largest.
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
    """Trains, and compares each loss change with the first order's prediction.

    dL = Σ ⟨∂L/∂θ, dθ⟩ for any dθ: of momentum, of Adam, or of a step on another
    sequence.

    Args:
      algorithm: how parameters move.
      loss_and_gradient: of one sequence.
      params: where to start.
      sample: step number -> the sequence to train on.
      heldout: a sequence to evaluate on.
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

        # One after another, so that one program serves both.
        both = jax.lax.map(trace, jax.tree.map(lambda *x: jnp.stack(x), batch, heldout))
        return after, Traces(*(jax.tree.map(lambda x, n=n: x[n], both) for n in (0, 1)))

    return jax.lax.scan(one, algorithm.init(params), jnp.arange(steps))[1]


def _upstream(params: Params, f: attention.Forward, targets: jax.Array) -> jax.Array:
    return laws.upstream_gradient(laws.logit_gradient(f.logit, targets), params.w_o)


# Exact finite changes, without a difference of two nearly equal numbers: a loss change
# has as many correct digits as the step, however small that is.


def _weight_change(weight: jax.Array, score_change: jax.Array) -> jax.Array:
    """Computes a' - a = a (e - ē) / (1 + ē), e = exp(ds) - 1, ē_i = Σ_j a_ij e_ij."""
    grown = jnp.expm1(score_change)
    mean = jnp.sum(weight * grown, axis=1, keepdims=True)
    return weight * (grown - mean) / (1 + mean)


def _loss_change(
    logit: jax.Array, logit_change: jax.Array, targets: jax.Array
) -> jax.Array:
    """Computes L' - L = mean_i (log Σ_c p_ic exp(dl_ic) - dl_i,y_i)."""
    grown = jnp.sum(jax.nn.softmax(logit) * jnp.expm1(logit_change), axis=1)
    of_target = jnp.take_along_axis(logit_change, targets[:, None], axis=1)[:, 0]
    return jnp.mean(jnp.log1p(grown) - of_target)


def _with_derivative(function: Callable) -> Callable:
    """Appends to a function's values f, f', ... the derivative of the last."""

    def further(x: jax.Array) -> tuple:
        values, slopes = jax.jvp(function, (x,), (jnp.ones_like(x),))
        return *values, slopes[-1]

    return further
