"""EM-like steps in every layer of a transformer at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxattn.algorithms.base import Algorithm, GradientFunction, Info, State
from jaxattn.algorithms.roles import role_of
from jaxattn.tasks.base import Batch


class FixedModel(NamedTuple):
    """Functions of a model, of a whole batch, that `layered_em` needs."""

    fix_attention: Callable[[Any, Batch], Any]  # -> all queries and keys
    value_gradient: Callable[[Any, Batch, Any], Any]  # ∂L with attention fixed


def layered_em(
    model: FixedModel,
    frame: optax.GradientTransformation,
    loss_and_gradient: GradientFunction,
    *,
    value_rate: jax.typing.ArrayLike,
    order: str,
    inner_steps: int,
) -> Algorithm:
    """Returns EM-like steps of every layer at once, with the `gradient` M-step.

    E-step: queries and keys of all layers, and so attention, are fixed.  M-step: W_V of
    all layers by -η_V ∂L/∂W_V with attention fixed, `inner_steps` times.  Frame step:
    the rest by optax, with the gradient of the whole model, taken after the M-step
    ("alternating") or before it ("simultaneous"; the first inner step then uses it too,
    so that with one inner step this is `two_timescale`).

    With one layer attention does not depend on what the M-step moves: this is `em`.

    Args:
      model: see `FixedModel`.
      frame: an optax transformation that does not move the values.
      loss_and_gradient: of a whole batch.
      value_rate: η_V.
      order: one of `ORDERS`.
      inner_steps: at least 1; static.

    Returns:
      Algorithm. Info.loss is that before the step.
    """

    def moved(params: Any, gradient: Any) -> Any:
        def leaf(path, weight, slope):
            return weight - value_rate * slope if role_of(path) == "value" else weight

        return jax.tree_util.tree_map_with_path(leaf, params, gradient)

    def init(params: Any) -> State:
        return State(params, frame.init(params))

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        params, frame_state = state
        held = model.fix_attention(params, batch)
        loss, grads = loss_and_gradient(params, batch, key)
        simultaneous = order == "simultaneous"
        first = grads if simultaneous else model.value_gradient(params, batch, held)
        values = jax.lax.fori_loop(
            1,
            inner_steps,
            lambda _, p: moved(p, model.value_gradient(p, batch, held)),
            moved(params, first),
        )
        if not simultaneous:
            _, grads = loss_and_gradient(values, batch, key)
        updates, frame_state = frame.update(grads, frame_state, values)
        return State(optax.apply_updates(values, updates), frame_state), Info(loss)

    return Algorithm(init, step)
