"""Gradient descent, by any optax transformation or with a rate for each role."""

from collections.abc import Callable, Collection

import jax
import optax

from jaxattn.algorithms.base import Algorithm, GradientFunction, Info, State
from jaxattn.algorithms.gradients import causal_gradient, over_sequences
from jaxattn.algorithms.roles import ROLES, by_role
from jaxattn.tasks.base import Batch
from jaxattn.theory.attention import Params


def gradient(
    tx: optax.GradientTransformation,
    loss_and_gradient: GradientFunction = causal_gradient,
    *,
    whole_batch: bool = False,
) -> Algorithm:
    """Returns gradient steps of any optax transformation.

    θ ← θ + tx(∂L/∂θ)

    Args:
      tx: an optax transformation; its rates may be traced.
      loss_and_gradient: of one sequence; default `by_streaming`, causal.
      whole_batch: whether it is of all sequences of a batch instead, (N, T, ...).

    Returns:
      Algorithm.
    """
    averaged = loss_and_gradient if whole_batch else over_sequences(loss_and_gradient)

    def init(params: Params) -> State:
        return State(params, tx.init(params))

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        loss, grads = averaged(state.params, batch, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), Info(loss)

    return Algorithm(init, step)


def two_timescale(
    *,
    routing_rate: jax.typing.ArrayLike,
    value_rate: jax.typing.ArrayLike,
    output_rate: jax.typing.ArrayLike,
    loss_and_gradient: GradientFunction = causal_gradient,
    roles: Collection[str] = ROLES,
    whole_batch: bool = False,
) -> Algorithm:
    """Returns gradient descent with a rate for each role; EM-like with fast values.

    W_Q, W_K ← W - η_QK ∂L/∂W,  W_V ← W_V - η_V ∂L/∂W_V,  W_O, b_O ← W - η_O ∂L/∂W

    In a transformer this holds for every layer, and η_O moves all other parameters.
    All gradients are taken at the same point ("simultaneous"), as in the authors'
    public script.

    Args:
      routing_rate: η_QK.
      value_rate: η_V.
      output_rate: η_O.
      loss_and_gradient: of one sequence; default `by_streaming`, causal.
      roles: all there are, see `by_role`.
      whole_batch: see `gradient`.

    Returns:
      Algorithm.

    Source: arXiv 2512.22473, section 4.
    """
    rest = tuple(role for role in roles if role not in ("query", "key", "value"))
    return gradient(
        by_role(
            {
                ("query", "key"): optax.sgd(routing_rate),
                "value": optax.sgd(value_rate),
                rest: optax.sgd(output_rate),
            },
            roles=roles,
        ),
        loss_and_gradient,
        whole_batch=whole_batch,
    )


def warm_up_cosine(warm_up: float, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns step -> share of the learning rate: a line up, then a half cosine down.

    n / (w N) for n < w N, then (1 + cos(π (n - w N) / (N - w N))) / 2

    Args:
      warm_up: w, share of the steps, in [0, 1).
      steps: N.
    """
    rising = min(round(warm_up * steps), steps - 1)
    if rising == 0:
        return optax.cosine_decay_schedule(1.0, steps)
    return optax.warmup_cosine_decay_schedule(0.0, 1.0, rising, steps)
