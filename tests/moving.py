"""What tests of algorithms share: steps of one, and rates by role."""

import jax
import optax

from jaxattn.algorithms import by_role


def run(algorithm, params, batch, steps):
    """Losses before each update, and the parameters after the last."""

    def step(state, key):
        state, info = algorithm.step(state, batch, key)
        return state, info.loss

    keys = jax.random.split(jax.random.key(0), steps)
    state, curve = jax.lax.scan(step, algorithm.init(params), keys)
    return curve, state.params


def frame(routing_rate=0.125, output_rate=0.25):
    """SGD on everything but the values."""
    return by_role(
        {("query", "key"): optax.sgd(routing_rate), "output": optax.sgd(output_rate)},
        still=("value",),
    )
