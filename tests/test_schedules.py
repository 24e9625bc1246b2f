"""Schedules: parity with the authors' script, and what each of them moves."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import random_problem, relative_error

from jaxattn import attention, losses, schedules
from jaxattn.tasks.base import Batch

ARMS = {
    "sgd": schedules.gradient(optax.sgd(0.01)),
    "em": schedules.two_timescale(routing_rate=0.01, value_rate=0.1, output_rate=0.01),
}


def run(schedule, params, batch, steps):
    """Losses before each update, and the parameters after the last."""

    def step(state, key):
        state, info = schedule.step(state, batch, key)
        return state, info.loss

    keys = jax.random.split(jax.random.key(0), steps)
    state, curve = jax.lax.scan(step, schedule.init(params), keys)
    return curve, state.params


@pytest.fixture(scope="module")
def retraced(references):
    """Every reference run again: (seed, arm) -> losses and final metrics."""

    def again(arm, params, batch):
        curve, trained = run(ARMS[arm], params, batch, 1000)
        mask = attention.causal_mask(len(batch.inputs))
        logit = attention.readout(trained, batch.inputs, mask).logit
        final = (
            losses.cross_entropy(logit, batch.targets),
            losses.predictive_entropy(logit),
            losses.accuracy(logit, batch.targets),
        )
        return curve, final

    programs = {arm: jax.jit(functools.partial(again, arm)) for arm in ARMS}
    cases = [(seed, arm) for seed in references for arm in ARMS]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(
            lambda case: jax.tree.map(
                np.asarray,
                programs[case[1]](
                    references[case[0]].params, references[case[0]].batch
                ),
            ),
            cases,
        )
        return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", ["42", "1337", "2024"])
def test_retraces_the_authors_script(references, retraced, seed, arm):
    reference = references[seed]
    curve, final = retraced[seed, arm]
    assert np.abs(curve - reference.losses[arm]).max() < 2e-5
    np.testing.assert_allclose(final, reference.final[arm], atol=2e-5)


def test_every_way_to_the_gradient_gives_the_same_trajectory(x64):
    params, inputs, targets = random_problem(0, length=300, scale=0.5)
    batch = Batch(inputs, targets)
    curves, trained = zip(
        *(
            jax.jit(
                functools.partial(
                    run,
                    schedules.two_timescale(
                        routing_rate=0.1,
                        value_rate=0.5,
                        output_rate=0.2,
                        loss_and_gradient=functools.partial(gradient, causal=True),
                    ),
                    steps=200,
                )
            )(params, batch)
            for gradient in schedules.GRADIENTS.values()
        ),
        strict=True,
    )
    assert curves[0][-1] < curves[0][0] - 0.01
    for curve, params in zip(curves[1:], trained[1:], strict=True):
        assert relative_error(curve, curves[0]) < 1e-9
        assert relative_error(params, trained[0]) < 1e-9


def test_two_timescale_is_one_gradient_and_a_rate_for_each_role():
    params, inputs, targets = random_problem(0, dtype=np.float32)
    batch = Batch(inputs, targets)
    rates = {"routing_rate": 0.125, "value_rate": 0.5, "output_rate": 0.25}
    schedule = schedules.two_timescale(**rates)
    step = jax.jit(schedule.step)
    state, info = step(schedule.init(params), batch, jax.random.key(0))
    loss, gradient = jax.jit(schedules.causal_gradient)(params, batch)
    assert info.loss == loss
    for name in params._fields:
        roles = {"w_q": "routing", "w_k": "routing", "w_v": "value"}
        rate = rates[roles.get(name, "output") + "_rate"]
        expected = getattr(params, name) - rate * getattr(gradient, name)
        np.testing.assert_array_equal(getattr(state.params, name), expected)


def test_equal_rates_are_plain_sgd():
    params, inputs, targets = random_problem(0, dtype=np.float32)
    batch = Batch(inputs, targets)
    curves = [
        run(schedule, params, batch, 20)[0]
        for schedule in (
            schedules.gradient(optax.sgd(0.1)),
            schedules.two_timescale(routing_rate=0.1, value_rate=0.1, output_rate=0.1),
        )
    ]
    np.testing.assert_array_equal(*curves)


def test_several_sequences_are_averaged(x64):
    problems = [random_problem(seed) for seed in range(3)]
    params = problems[0][0]
    batches = [Batch(inputs, targets) for _, inputs, targets in problems]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    one = jax.jit(schedules.causal_gradient)
    together = jax.jit(schedules.over_sequences(one))(params, stacked)
    apart = [one(params, batch) for batch in batches]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *apart)
    assert relative_error(together, mean) < 1e-14


@pytest.mark.parametrize("optimizer", schedules.OPTIMIZERS)
def test_a_grid_of_rates_is_traced_once(optimizer):
    params, inputs, targets = random_problem(0, dtype=np.float32)
    batch = Batch(inputs, targets)
    traces = []

    @jax.jit
    def trained(rate):
        traces.append(rate)
        structure = schedules.Structure("gradient", optimizer)
        schedule = schedules.build(
            structure, {"learning_rate": rate}, schedules.causal_gradient
        )
        return run(schedule, params, batch, 3)[0]

    with jax.numpy_dtype_promotion("standard"):  # Adam's own arithmetic
        curves = [trained(jnp.float32(rate)) for rate in (0.0, 0.01, 0.1)]
    assert len(traces) == 1
    assert curves[0][2] == curves[0][0]
    assert curves[2][2] < curves[1][2] < curves[0][2]
