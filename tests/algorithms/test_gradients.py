"""Routes to the gradient of one head, and to its contexts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from moving import run
from problems import random_problem, relative_error

from jaxattn.algorithms import descent, gradients
from jaxattn.algorithms.gradients import Wiring
from jaxattn.tasks.base import Batch


def test_every_route_gives_the_same_trajectory(x64):
    params, inputs, targets = random_problem(0, length=150, scale=0.5)
    batch = Batch(inputs, targets)
    curves, trained = zip(
        *(
            jax.jit(
                functools.partial(
                    run,
                    descent.two_timescale(
                        routing_rate=0.1,
                        value_rate=0.5,
                        output_rate=0.2,
                        loss_and_gradient=functools.partial(
                            gradient, wiring=Wiring(causal=True)
                        ),
                    ),
                    steps=40,
                )
            )(params, batch)
            for gradient in gradients.GRADIENTS.values()
        ),
        strict=True,
    )
    assert curves[0][-1] < curves[0][0] - 0.01
    for curve, params in zip(curves[1:], trained[1:], strict=True):
        assert relative_error(curve, curves[0]) < 1e-9
        assert relative_error(params, trained[0]) < 1e-9


@pytest.mark.parametrize(
    "wiring",
    [
        Wiring(False, value_norm=True),
        Wiring(True, dropout_rate=0.3),
        Wiring(True, value_norm=True, dropout_rate=0.3),
    ],
)
def test_every_route_gives_the_same_gradient_with_norm_and_dropout(wiring):
    """Also which weights are dropped."""
    params, inputs, targets = random_problem(0, length=40, dtype=np.float32)
    batch = Batch(inputs, targets, jnp.arange(1.0, 41))
    found = {
        name: jax.jit(functools.partial(route, wiring=wiring))(
            params, batch, jax.random.key(7)
        )
        for name, route in gradients.GRADIENTS.items()
    }
    plain = jax.jit(
        functools.partial(gradients.by_autodiff, wiring=Wiring(wiring.causal))
    )(params, batch)
    for loss, gradient in found.values():
        assert loss == pytest.approx(float(found["autodiff"][0]), rel=1e-5)
        assert relative_error(gradient, found["autodiff"][1]) < 2e-5
        assert relative_error(gradient, plain[1]) > 0.05


def test_several_sequences_are_averaged(x64):
    problems = [random_problem(seed) for seed in range(3)]
    params = problems[0][0]
    batches = [Batch(inputs, targets) for _, inputs, targets in problems]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    one = jax.jit(gradients.causal_gradient)
    together = jax.jit(gradients.over_sequences(one))(params, stacked)
    apart = [one(params, batch) for batch in batches]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *apart)
    assert relative_error(together, mean) < 1e-14


def test_each_step_and_sequence_drops_other_weights():
    params, inputs, targets = random_problem(0, length=20, dtype=np.float32)
    wired = jax.jit(
        functools.partial(gradients.by_streaming, wiring=Wiring(True, dropout_rate=0.5))
    )
    algorithm = descent.gradient(optax.sgd(0.1), wired)
    twice = Batch(jnp.stack([inputs] * 2), jnp.stack([targets] * 2))
    step = jax.jit(algorithm.step)
    losses_ = [
        step(algorithm.init(params), twice, jax.random.key(number))[1].loss
        for number in (0, 1)
    ]
    assert losses_[0] != losses_[1]
    alone = [
        wired(params, Batch(inputs, targets), jax.random.fold_in(jax.random.key(0), n))
        for n in (0, 1)
    ]
    assert alone[0][0] != alone[1][0]
    assert losses_[0] == pytest.approx(float(sum(a[0] for a in alone)) / 2, rel=1e-5)
