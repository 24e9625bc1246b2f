"""Algorithms by the names of configs: their fields, and one program for all rates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from moving import run
from problems import random_problem, relative_error

from jaxattn.algorithms import (
    SPECS,
    AlgorithmSpec,
    HeadModel,
    descent,
    gradients,
    on_grid,
    specs,
)
from jaxattn.algorithms.em import ORDERS
from jaxattn.fields import RATE
from jaxattn.tasks.base import Batch


def em_arm(m_step, order):
    arm = {"algorithm": "em", "optimizer": "sgd", "m_step": m_step}
    return arm | {"order": order, "inner_steps": 2}


ARMS = {
    **{name: {"algorithm": "gradient", "optimizer": name} for name in specs.OPTIMIZERS},
    "two_timescale": {"algorithm": "two_timescale"},
    **{
        f"{m_step}, {order}": em_arm(m_step, order)
        for m_step in specs.M_STEPS
        for order in ORDERS
    },
}


def spec_of(arm):
    algorithm = arm["algorithm"]
    return algorithm if isinstance(algorithm, AlgorithmSpec) else SPECS[algorithm]


def built(arm, rates, name):
    model = HeadModel(
        functools.partial(
            gradients.GRADIENTS[name], wiring=gradients.Wiring(causal=True)
        ),
        functools.partial(gradients.MIXES[name], causal=True),
        steps=100,
    )
    return spec_of(arm).head(arm, rates, model)


def rates_of(arm, rates):
    return {name: rates[name] for name in spec_of(arm).rates(arm)}


@pytest.mark.parametrize("name", ARMS)
def test_a_grid_of_rates_is_traced_once(name):
    params, inputs, targets = random_problem(0, dtype=np.float32)
    batch = Batch(inputs, targets)
    rates = {
        "routing_rate": 1.0,
        "output_rate": 1.0,
        "value_rate": 1.0,
        "learning_rate": 0.1,
        "ridge": 0.1,
        "damping": 1.0,
        "statistics_rate": 1.0,
    }
    rates = rates_of(ARMS[name], rates)
    traces = []

    @jax.jit
    def trained(rates):
        traces.append(rates)
        return run(built(ARMS[name], rates, "autodiff"), params, batch, 3)[0]

    curves = []
    with jax.numpy_dtype_promotion("standard"):  # Adam's own arithmetic
        for scale in (1e-3, 0.01, 0.1):
            factors = dict.fromkeys(rates, scale) | {"ridge": 1 / scale}
            now = {name: factors[name] * rate for name, rate in rates.items()}
            curves.append(trained(jax.tree.map(jnp.float32, now)))
    assert len(traces) == 1
    assert curves[2][2] < curves[1][2] < curves[0][2]


@pytest.mark.parametrize(
    ("m_step", "order"),
    [
        ("majorised", "alternating"),  # it uses all that fixed attention has
        *(
            pytest.param(m_step, order, marks=pytest.mark.slow)
            for m_step in specs.M_STEPS
            for order in ORDERS
            if (m_step, order) != ("majorised", "alternating")
        ),
    ],
)
def test_every_route_gives_the_same_em(x64, m_step, order):
    params, inputs, targets = random_problem(0, length=70, scale=0.5)
    batch = Batch(inputs, targets)
    rates = {"routing_rate": 0.1, "output_rate": 0.2, "value_rate": 0.5}
    rates |= {"ridge": 0.01, "damping": 0.9, "statistics_rate": 0.5}
    arm = em_arm(m_step, order)
    rates = rates_of(arm, rates)
    (curve, trained), *others = (
        jax.jit(functools.partial(run, built(arm, rates, name), steps=15))(
            params, batch
        )
        for name in gradients.MIXES
    )
    assert curve[-1] < curve[0] - 0.01
    for other_curve, other in others:
        assert relative_error(other_curve, curve) < 1e-9
        assert relative_error(other, trained) < 1e-9


WIRING = ["value_norm", "dropout_rate"]
ROUTING_AND_OUTPUT = ["routing_rate", "output_rate"]
EM = ["optimizer", "m_step", "order", "inner_steps"]


@pytest.mark.parametrize(
    ("arm", "static", "optional", "rates"),
    [
        (ARMS["sgd"], ["optimizer"], WIRING, ["learning_rate"]),
        (
            {"algorithm": "gradient", "optimizer": "adamw"},
            ["optimizer"],
            [*WIRING, "warm_up"],
            ["learning_rate", "weight_decay"],
        ),
        (
            ARMS["two_timescale"],
            [],
            WIRING,
            ["routing_rate", "value_rate", "output_rate"],
        ),
        (
            em_arm("gradient", "alternating"),
            EM,
            [],
            [*ROUTING_AND_OUTPUT, "value_rate"],
        ),
        (
            em_arm("prototype", "alternating"),
            EM,
            [],
            [*ROUTING_AND_OUTPUT, "value_rate", "ridge"],
        ),
        (
            em_arm("majorised", "alternating"),
            EM,
            [],
            [*ROUTING_AND_OUTPUT, "ridge", "damping", "statistics_rate"],
        ),
        ({"algorithm": "gradient", "optimizer": "none"}, ["optimizer"], WIRING, []),
        ({"algorithm": "gradient", "optimizer": ["sgd"]}, ["optimizer"], WIRING, []),
        ({"algorithm": "gradient"}, ["optimizer"], WIRING, []),
        ({"algorithm": "em", "m_step": {}}, EM, [], []),
    ],
)
def test_fields_of_an_arm(arm, static, optional, rates):
    """As far as those that decide on others are right."""
    spec = SPECS[arm["algorithm"]]
    assert list(spec.static(arm)) == static
    assert list(spec.optional(arm)) == optional
    assert list(spec.rates(arm)) == rates


@pytest.mark.parametrize(
    ("name", "arm", "field", "right", "wrong"),
    [
        ("gradient", {}, "optimizer", ["sgd", "adamw"], ["none", 1, None]),
        ("gradient", {}, "dropout_rate", [0, 0.5], [1, -0.1, True]),
        ("gradient", {}, "value_norm", [True, False], [1, "true"]),
        ("gradient", {"optimizer": "adamw"}, "warm_up", [0, 0.9], [1, -0.1]),
        ("gradient", {"optimizer": "sgd"}, "learning_rate", [0, 1e30], [-1, np.inf]),
        ("em", {}, "optimizer", ["sgd", "adam"], ["adamw"]),
        ("em", {}, "order", ["alternating"], ["together"]),
        ("em", {}, "inner_steps", [1, 1000], [0, 1001, 1.0]),
        ("em", {"m_step": "majorised"}, "ridge", [0], [-1]),
        ("em", {"m_step": "majorised"}, "damping", [1, 0.1], [0, 1.1]),
        ("em", {"m_step": "majorised"}, "statistics_rate", [1, 0.1], [0, 1.1]),
    ],
)
def test_bounds_of_fields(name, arm, field, right, wrong):
    spec = SPECS[name]
    rules = {**spec.static(arm), **spec.optional(arm), **spec.rates(arm)}
    assert all(map(rules[field].accepts, right))
    assert not any(map(rules[field].accepts, wrong))


def test_only_em_is_for_attention_only_and_of_its_m_steps_one_for_layers():
    assert [n for n, spec in SPECS.items() if spec.fixes_attention] == ["em"]
    assert [n for n, spec in SPECS.items() if spec.splits_by_ratio] == ["two_timescale"]
    for m_step in specs.M_STEPS:
        wrong = SPECS["em"].wrong_in_layers({"m_step": m_step})
        assert wrong == (None if m_step == "gradient" else ("m_step", "gradient"))
    assert SPECS["gradient"].wrong_in_layers({}) is None


def test_points_of_a_grid_scale_rates():
    scale, ratio = np.array([1.0, 3.0]), np.array([10.0, 0.1])
    rates = {"routing_rate": 2.0, "value_rate": 5.0, "ridge": 7.0, "damping": 0.5}
    found = on_grid(rates, scale, ratio)
    assert list(found) == list(rates)
    np.testing.assert_allclose(found["routing_rate"], 2 * scale)
    np.testing.assert_allclose(found["value_rate"], 5 * scale * ratio)
    np.testing.assert_allclose(found["ridge"], [7, 7])
    np.testing.assert_allclose(found["damping"], [0.5, 0.5])
    # Values that move in closed form are slowed down by their ridge instead.
    closed = {"output_rate": 2.0, "ridge": 7.0, "statistics_rate": 0.5}
    found = on_grid(closed, scale, ratio)
    np.testing.assert_allclose(found["output_rate"], 2 * scale)
    np.testing.assert_allclose(found["ridge"], 7 / ratio)
    np.testing.assert_allclose(found["statistics_rate"], [0.5, 0.5])
    found = on_grid({"learning_rate": 2.0, "weight_decay": 0.3}, scale, ratio)
    np.testing.assert_allclose(found["learning_rate"], 2 * scale)
    np.testing.assert_allclose(found["weight_decay"], [0.3, 0.3])


def test_adamw_moves_at_its_rate_and_decays_weights():
    rates = {"learning_rate": 0.1, "weight_decay": 0.2}
    tx = specs.SCHEDULED["adamw"].build({"warm_up": 0.5}, rates, 4)
    params = {"w": np.array([2.0, -3.0], np.float32)}
    slope = {"w": np.array([1.0, 5.0], np.float32)}
    with jax.numpy_dtype_promotion("standard"):  # optax takes powers of a count
        update = jax.jit(tx.update)
        updates, state = update(slope, tx.init(params), params)
        np.testing.assert_array_equal(updates["w"], 0)  # the first rate is 0
        updates, _ = update(slope, state, params)
    expected = -0.05 * (1 + 0.2 * params["w"])
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-4)


def test_adamw_without_warm_up_starts_at_its_rate():
    rates = {"learning_rate": 0.1, "weight_decay": 0.0}
    tx = specs.SCHEDULED["adamw"].build({}, rates, 4)
    params = {"w": np.ones(2, np.float32)}
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-4)


def test_an_algorithm_of_ones_own_is_one_entry():
    """As a config file has it in ALGORITHMS; see also test_extension.py."""
    own = AlgorithmSpec(
        about="every weight moves by the sign of its gradient",
        rates=lambda arm: {"learning_rate": RATE},
        head=lambda arm, rates, model: descent.gradient(
            optax.sign_sgd(rates["learning_rate"]), model.loss_and_gradient
        ),
    )
    params, inputs, targets = random_problem(0, dtype=np.float32)
    algorithm = built({"algorithm": own}, {"learning_rate": 0.125}, "laws")
    step = jax.jit(algorithm.step)
    state, _ = step(algorithm.init(params), Batch(inputs, targets), jax.random.key(0))
    moved = jax.tree.map(lambda a, b: np.abs(a - b), state.params, params)
    for leaf in jax.tree.leaves(moved):
        np.testing.assert_allclose(leaf, 0.125, rtol=1e-5)
    assert own.layers is None
    assert own.static({}) == own.optional({}) == {}
    assert own.wrong_in_layers({}) is None


def test_momentum_adds_nine_tenths_of_the_last_step():
    tx = specs.OPTIMIZERS["momentum"](0.5)
    slope = np.ones(2, np.float32)
    first, state = tx.update(slope, tx.init(slope))
    second, _ = tx.update(slope, state)
    np.testing.assert_allclose(first, -0.5)
    np.testing.assert_allclose(second, -0.95)


@pytest.mark.parametrize("order", ORDERS)
def test_em_attends_and_differentiates_as_its_model_does(order):
    params, inputs, targets = random_problem(0, dtype=np.float32)
    called = set()

    def loss_and_gradient(params, batch, key):
        called.add("gradient")
        return jnp.float32(1), params

    def mix(query, key, value):
        called.add("mix")
        return value

    arm = em_arm("gradient", order)
    rates = dict.fromkeys(SPECS["em"].rates(arm), 0.1)
    algorithm = SPECS["em"].head(arm, rates, HeadModel(loss_and_gradient, mix, 10))
    batch, key = Batch(inputs, targets), jax.random.key(0)
    jax.eval_shape(algorithm.step, algorithm.init(params), batch, key)
    assert called == {"mix"} | ({"gradient"} if order == "simultaneous" else set())
