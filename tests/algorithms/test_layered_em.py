"""Algorithms on the layers of a transformer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import relative_error
from small_models import (
    ONE_HEAD,
    architecture,
    drawn,
    one_head_problem,
    targets,
    tokens,
)

from jaxattn.algorithms import SPECS, FixedModel, LayeredModel, roles
from jaxattn.algorithms.em import em
from jaxattn.models import transformer
from jaxattn.tasks.base import Batch
from jaxattn.theory import losses, m_steps

RATES = {"routing_rate": 0.1, "value_rate": 0.3, "output_rate": 0.7}
EM = {
    "optimizer": "sgd",
    "m_step": "gradient",
    "order": "simultaneous",
    "inner_steps": 1,
}


def batch_of(count=3):
    inputs = np.stack([tokens(seed) for seed in range(count)])
    return Batch(inputs, np.stack([targets(10 + seed) for seed in range(count)]))


def layered(model):
    """What an algorithm is given of a model."""
    forward = functools.partial(transformer.apply, model)

    def loss(params, batch, held=None):
        def one(x, y, held):
            return losses.cross_entropy(forward(params, x, held=held).logit, y)

        return jnp.mean(jax.vmap(one)(batch.inputs, batch.targets, held))

    def fix_attention(params, batch):
        found = jax.vmap(lambda x: forward(params, x))(batch.inputs)
        return tuple(transformer.Held(h.query, h.key) for h in found.heads)

    def loss_and_gradient(params, batch, _):
        return jax.value_and_grad(loss)(params, batch)

    fixed = FixedModel(fix_attention, jax.grad(loss))
    return LayeredModel(loss_and_gradient, fixed, steps=10)


def test_two_timescale_moves_every_layer_by_the_rate_of_its_role():
    model = architecture()
    params, batch, parts = drawn(model), batch_of(), layered(model)
    algorithm = SPECS["two_timescale"].layers({}, RATES, parts)

    @jax.jit
    def run(params):
        state, _ = algorithm.step(algorithm.init(params), batch, jax.random.key(0))
        return state.params, parts.loss_and_gradient(params, batch, None)[1]

    after, slope = run(params)
    rate_of = dict.fromkeys(("query", "key"), 0.1) | {"value": 0.3}
    moved, _ = jax.tree_util.tree_flatten_with_path(
        jax.tree.map(lambda a, b: np.asarray(a) - b, after, params)
    )
    for (path, motion), g in zip(moved, jax.tree.leaves(slope), strict=True):
        rate = rate_of.get(roles.role_of(path), 0.7)
        np.testing.assert_allclose(motion, -rate * np.asarray(g), rtol=1e-3, atol=2e-7)


@pytest.mark.slow
def test_simultaneous_em_with_one_step_is_two_timescale():
    model = architecture()
    params, batch = drawn(model), batch_of()
    states = []
    for name, arm in (("em", EM), ("two_timescale", {})):
        algorithm = SPECS[name].layers(arm, RATES, layered(model))
        step, state = jax.jit(algorithm.step), algorithm.init(params)
        for _ in range(3):
            state, _ = step(state, batch, jax.random.key(0))
        states.append(state.params)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("order", "inner"),
    [
        ("alternating", 3),
        pytest.param("simultaneous", 2, marks=pytest.mark.slow),
    ],
)
def test_em_of_one_layer_is_em_of_the_head(x64, order, inner):
    params, head, inputs = one_head_problem()
    block = params["blocks"][0]["attention"]
    block["output"]["kernel"] = jnp.eye(6, 8)
    head = head._replace(w_o=params["unembed"]["kernel"][:6])
    batch = Batch(inputs[None], targets(5)[None])
    # The product of two matrices does not move as one: here only W_O may.
    of_head = em(
        m_steps.gradient(0.3),
        roles.by_role({("query", "key"): optax.sgd(0.1)}, still=("value", "output")),
        order=order,
        inner_steps=inner,
        frame_roles=("query", "key"),
        still=("output",),
    )
    of_layers = SPECS["em"].layers(
        EM | {"order": order, "inner_steps": inner},
        RATES | {"output_rate": 0.0},
        layered(ONE_HEAD),
    )
    mine, theirs = of_layers.init(params), of_head.init(head)
    my_step, their_step = jax.jit(of_layers.step), jax.jit(of_head.step)
    for _ in range(4):
        mine, info = my_step(mine, batch, jax.random.key(0))
        theirs, expected = their_step(theirs, batch, jax.random.key(0))
        assert relative_error(info.loss, expected.loss) < 1e-12
    found = mine.params["blocks"][0]["attention"]
    for name, weight in (
        ("query", theirs.params.w_q),
        ("key", theirs.params.w_k),
        ("value", theirs.params.w_v),
    ):
        assert relative_error(found[name]["kernel"], weight) < 1e-10
        assert relative_error(found[name]["kernel"], block[name]["kernel"]) > 1e-3
