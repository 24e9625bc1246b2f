"""How parameters move: pure (init, step) pairs, in the manner of optax.

`step` is given one sequence or several (a leading axis, averaged over). Learning rates
may be traced, so that a grid of them is one program.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxattn import attention, laws, losses, streaming
from jaxattn.attention import Params
from jaxattn.tasks.base import Batch

GradientFunction = Callable[[Params, Batch], tuple[jax.Array, Params]]


class State(NamedTuple):
    """What a schedule carries from step to step."""

    params: Params
    opt_state: optax.OptState


class Info(NamedTuple):
    """What a step reports."""

    loss: jax.Array  # nats, before the update


class Schedule(NamedTuple):
    """A pure training schedule.

    init(params) -> State;  step(state, batch, key) -> (State, Info)
    """

    init: Callable[[Params], State]
    step: Callable[[State, Batch, jax.Array], tuple[State, Info]]


def by_streaming(
    params: Params, batch: Batch, *, causal: bool
) -> tuple[jax.Array, Params]:
    """Loss and gradient of one sequence through `streaming.attend`."""

    def loss(params: Params) -> jax.Array:
        roles = (params.w_q, params.w_k, params.w_v)
        projected = [batch.inputs @ role for role in roles]
        context = streaming.attend(*projected, causal=causal)
        logit = attention.read_out(params, context)
        return losses.cross_entropy(logit, batch.targets, batch.weights)

    return jax.value_and_grad(loss)(params)


def by_laws(params: Params, batch: Batch, *, causal: bool) -> tuple[jax.Array, Params]:
    """Loss and gradient of one sequence by the hand-derived laws."""
    mask = attention.causal_mask(len(batch.inputs)) if causal else None
    return laws.loss_and_gradient(
        params, batch.inputs, batch.targets, mask, batch.weights
    )


def by_autodiff(
    params: Params, batch: Batch, *, causal: bool
) -> tuple[jax.Array, Params]:
    """Loss and gradient of one sequence by autodiff of the dense forward pass."""
    mask = attention.causal_mask(len(batch.inputs)) if causal else None

    def loss(params: Params) -> jax.Array:
        logit = attention.forward(params, batch.inputs, mask).logit
        return losses.cross_entropy(logit, batch.targets, batch.weights)

    return jax.value_and_grad(loss)(params)


GRADIENTS = {"streaming": by_streaming, "laws": by_laws, "autodiff": by_autodiff}
causal_gradient = functools.partial(by_streaming, causal=True)


def over_sequences(gradient_function: GradientFunction) -> GradientFunction:
    """Averages a gradient function over the sequences of a batch, if it has several.

    Args:
      gradient_function: of one sequence.

    Returns:
      The same for inputs (T, d_x), and the mean over N for inputs (N, T, d_x).
    """

    def averaged(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        if batch.inputs.ndim == 2:
            return gradient_function(params, batch)
        # One after another: each has a cache-sized working set.
        results = jax.lax.map(lambda one: gradient_function(params, one), batch)
        return jax.tree.map(lambda r: jnp.mean(r, axis=0), results)

    return averaged


def gradient(
    tx: optax.GradientTransformation,
    loss_and_gradient: GradientFunction = causal_gradient,
) -> Schedule:
    """Gradient steps of any optax transformation.

    θ ← θ + tx(∂L/∂θ)

    Args:
      tx: an optax transformation; its rates may be traced.
      loss_and_gradient: of one sequence; default `by_streaming`, causal.

    Returns:
      Schedule.
    """
    averaged = over_sequences(loss_and_gradient)

    def init(params: Params) -> State:
        return State(params, tx.init(params))

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        del key  # nothing random in a plain gradient step
        loss, grads = averaged(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), Info(loss)

    return Schedule(init, step)


def two_timescale(
    *,
    routing_rate: jax.typing.ArrayLike,
    value_rate: jax.typing.ArrayLike,
    output_rate: jax.typing.ArrayLike,
    loss_and_gradient: GradientFunction = causal_gradient,
) -> Schedule:
    """Gradient descent with a rate for each role; EM-like where values are fast.

    W_Q, W_K ← W - η_QK ∂L/∂W,  W_V ← W_V - η_V ∂L/∂W_V,  W_O, b_O ← W - η_O ∂L/∂W

    All at the same point ("simultaneous"), as in the authors' public script.

    Args:
      routing_rate: η_QK.
      value_rate: η_V.
      output_rate: η_O.
      loss_and_gradient: of one sequence; default `by_streaming`, causal.

    Returns:
      Schedule.

    Source: arXiv 2512.22473, section 4.
    """

    def roles(params: Params) -> Params:
        output = jax.tree.map(lambda _: "output", params)
        return output._replace(w_q="routing", w_k="routing", w_v="value")

    rates = {"routing": routing_rate, "value": value_rate, "output": output_rate}
    steps = {role: optax.sgd(rate) for role, rate in rates.items()}
    return gradient(optax.partition(steps, roles), loss_and_gradient)


class Structure(NamedTuple):
    """The part of an arm that shapes the compiled program."""

    schedule: str
    optimizer: str | None  # of the schedule "gradient"


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
}

# Schedule -> the rates it asks for.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "gradient": ("learning_rate",),
    "two_timescale": ("routing_rate", "value_rate", "output_rate"),
}


def build(
    structure: Structure, rates: dict, loss_and_gradient: GradientFunction
) -> Schedule:
    """The schedule that an arm of a config asks for.

    Args:
      structure: names from `SCHEDULES` and `OPTIMIZERS`.
      rates: name -> learning rate, possibly traced.
      loss_and_gradient: of one sequence.

    Returns:
      Schedule.
    """
    if structure.schedule == "two_timescale":
        return two_timescale(**rates, loss_and_gradient=loss_and_gradient)
    return gradient(OPTIMIZERS[structure.optimizer](**rates), loss_and_gradient)
