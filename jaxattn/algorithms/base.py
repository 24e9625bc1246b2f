"""Algorithms: pure (init, step) pairs that move parameters.

In the manner of optax and blackjax: State carries, Info reports. `step` is given one
sequence or several (a leading axis, averaged over). Learning rates may be traced, so
that a grid of them is one program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxattn.tasks.base import Batch
from jaxattn.theory.attention import Params

# Of parameters, a sequence, and a random key (of dropout).
GradientFunction = Callable[[Params, Batch, jax.Array], tuple[jax.Array, Params]]
MixFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class State(NamedTuple):
    """State that an algorithm carries from step to step."""

    params: Any  # `attention.Params`, or nested dicts of `transformer`
    opt_state: Any  # of optax, or `em.EMState`


class Info(NamedTuple):
    """Report of a step."""

    loss: jax.Array  # nats, before the update


class Algorithm(NamedTuple):
    """A pure training algorithm.

    init(params) -> State;  step(state, batch, key) -> (State, Info)
    """

    init: Callable[[Any], State]
    step: Callable[[State, Batch, jax.Array], tuple[State, Info]]
