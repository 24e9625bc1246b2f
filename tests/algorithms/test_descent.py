"""Gradient descent: parity with the authors' script, and what each rate moves."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from compiling import OPTIMIZED
from moving import run
from problems import random_problem

from jaxattn.algorithms import descent, gradients
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, losses

# Their SGD is equal rates, see below. Rates are traced: one program runs both.
AUTHORS = {
    "sgd": {"routing_rate": 0.01, "value_rate": 0.01, "output_rate": 0.01},
    "em": {"routing_rate": 0.01, "value_rate": 0.1, "output_rate": 0.01},
}


@pytest.fixture(scope="module")
def retraced(references):
    """A reference run again: seed -> arm -> losses and final metrics."""

    def again(steps, rates, params, batch):
        curve, trained = run(descent.two_timescale(**rates), params, batch, steps)
        mask = attention.causal_mask(len(batch.inputs))
        logit = attention.readout(trained, batch.inputs, mask).logit
        final = (
            losses.cross_entropy(logit, batch.targets),
            losses.predictive_entropy(logit),
            losses.accuracy(logit, batch.targets),
        )
        return curve, final

    program = jax.jit(again, static_argnums=0, compiler_options=OPTIMIZED)

    @functools.cache
    def both(seed, steps):
        with ThreadPoolExecutor(2) as pool:
            results = pool.map(
                lambda arm: program(
                    steps, jax.tree.map(np.float32, AUTHORS[arm]), *references[seed][:2]
                ),
                AUTHORS,
            )
            return jax.tree.map(np.asarray, dict(zip(AUTHORS, results, strict=True)))

    return both


@pytest.mark.parametrize("arm", AUTHORS)
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        ("42", 20),
        *(
            pytest.param(seed, 1000, marks=pytest.mark.slow)
            for seed in ("42", "1337", "2024")
        ),
    ],
)
def test_retraces_the_authors_script(references, retraced, seed, steps, arm):
    reference = references[seed]
    curve, final = retraced(seed, steps)[arm]
    assert np.abs(curve - reference.losses[arm][:steps]).max() < 2e-5
    if steps == 1000:
        np.testing.assert_allclose(final, reference.final[arm], atol=2e-5)


def test_two_timescale_is_one_gradient_and_a_rate_for_each_role():
    params, inputs, targets = random_problem(0, dtype=np.float32)
    batch = Batch(inputs, targets)
    rates = {"routing_rate": 0.125, "value_rate": 0.5, "output_rate": 0.25}
    algorithm = descent.two_timescale(**rates)
    step = jax.jit(algorithm.step)
    state, info = step(algorithm.init(params), batch, jax.random.key(0))
    loss, gradient = jax.jit(gradients.causal_gradient)(params, batch)
    assert info.loss == loss
    for name in params._fields:
        parts = {"w_q": "routing", "w_k": "routing", "w_v": "value"}
        rate = rates[parts.get(name, "output") + "_rate"]
        expected = getattr(params, name) - rate * getattr(gradient, name)
        np.testing.assert_array_equal(getattr(state.params, name), expected)


def test_equal_rates_are_plain_sgd():
    params, inputs, targets = random_problem(0, dtype=np.float32)
    batch = Batch(inputs, targets)
    curves = [
        run(algorithm, params, batch, 20)[0]
        for algorithm in (
            descent.gradient(optax.sgd(0.1)),
            descent.two_timescale(routing_rate=0.1, value_rate=0.1, output_rate=0.1),
        )
    ]
    np.testing.assert_array_equal(*curves)


def test_the_rate_warms_up_and_cools_down():
    share = descent.warm_up_cosine(0.2, 100)
    found = np.array([share(n) for n in (0, 10, 20, 60, 100)])
    np.testing.assert_allclose(found, [0, 0.5, 1, 0.5, 0], atol=1e-6)
    assert descent.warm_up_cosine(0.0, 100)(0) == 1
    assert descent.warm_up_cosine(0.999, 1)(0) == 1  # too few steps to warm up
