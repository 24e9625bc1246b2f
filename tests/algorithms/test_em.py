"""EM-like steps of one head."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from moving import frame, run
from problems import random_problem, relative_error

from jaxattn.algorithms import descent, gradients, roles, specs
from jaxattn.algorithms.em import em, fix_attention
from jaxattn.analysis import stats
from jaxattn.tasks import sticky
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, losses, m_steps

DENSE = functools.partial(gradients.mix_by_autodiff, causal=True)


@pytest.mark.parametrize(("name", "sequences"), [("streaming", 0), ("laws", 3)])
def test_em_with_one_gradient_step_at_the_same_point_is_two_timescale(name, sequences):
    """Bit for bit, over 12 steps; `sequences`: of a batch, 0 for no such axis."""
    params, inputs, targets = random_problem(0, length=150, dtype=np.float32)
    batch = Batch(inputs, targets)
    if sequences:
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * sequences), batch)
        batch = batch._replace(inputs=batch.inputs.at[1].multiply(2))
    route = functools.partial(
        gradients.GRADIENTS[name], wiring=gradients.Wiring(causal=True)
    )
    theirs = descent.two_timescale(
        routing_rate=0.125, value_rate=0.5, output_rate=0.25, loss_and_gradient=route
    )
    ours = em(
        m_steps.gradient(0.5),
        frame(),
        order="simultaneous",
        mix=functools.partial(gradients.MIXES[name], causal=True),
        loss_and_gradient=route,
    )
    (curve, trained), (expected_curve, expected) = (
        jax.jit(functools.partial(run, algorithm, steps=12))(params, batch)
        for algorithm in (ours, theirs)
    )
    assert expected_curve[-1] < expected_curve[0] - 0.1
    np.testing.assert_array_equal(curve, expected_curve)
    jax.tree.map(np.testing.assert_array_equal, trained, expected)


@pytest.mark.parametrize(
    ("name", "sequences"),
    [("streaming", 0), ("streaming", 2), ("laws", 0), ("autodiff", 2)],
)
def test_the_frame_moves_along_the_gradient_after_the_m_step(x64, name, sequences):
    params, inputs, targets = random_problem(0, length=40)
    weights = jnp.where(jnp.arange(40) % 3 == 0, 0.0, 1.0)
    batch = Batch(inputs, targets, weights)
    if sequences:
        batch = Batch(
            jnp.stack([inputs, inputs[::-1]]),
            jnp.stack([targets, targets]),
            jnp.stack([weights, 2 * weights]),
        )
    algorithm = em(
        m_steps.majorised(0.1),
        frame(1.0, 1.0),
        inner_steps=2,
        mix=functools.partial(gradients.MIXES[name], causal=True),
    )
    state, info = jax.jit(algorithm.step)(algorithm.init(params), batch, None)
    moved = params._replace(w_v=state.params.w_v)
    assert relative_error(moved.w_v, params.w_v) > 1e-3
    by_autodiff = functools.partial(
        gradients.by_autodiff, wiring=gradients.Wiring(causal=True)
    )
    gradient = jax.jit(gradients.over_sequences(by_autodiff))
    before, _ = gradient(params, batch)
    _, after = gradient(moved, batch)
    expected = jax.tree.map(jnp.subtract, moved, after)._replace(w_v=moved.w_v)
    assert relative_error(state.params, expected) < 1e-13
    assert relative_error(info.loss, before) < 1e-13


def test_fixed_attention_is_that_of_the_dense_head(x64):
    """Z = a X and X' diag(N) X of dense attention; several sequences one by one."""
    params, inputs, targets = random_problem(1, length=30)
    sequences = jnp.stack([inputs, inputs[::-1]])
    weights = jnp.stack([jnp.ones(30), jnp.arange(30.0)])
    batch = Batch(sequences, jnp.stack([targets, targets]), weights)
    held, _ = jax.jit(lambda p, b: fix_attention(p, b, gradients.causal_mix))(
        params, batch
    )
    mask = attention.causal_mask(30)
    moments = []
    weight_of = jax.jit(lambda *of: attention.forward(*of).weight)
    for n, x in enumerate(np.asarray(sequences)):
        weight = np.asarray(weight_of(params, x, mask))
        rows = slice(30 * n, 30 * (n + 1))
        assert relative_error(held.mixed[rows], weight @ x) < 1e-13
        share = np.asarray(weights[n]) / np.sum(weights[n]) / 2
        assert relative_error(held.share[rows], share) < 1e-14
        moments.append(x.T @ (weight.sum(axis=0)[:, None] * x))
    assert relative_error(held.moment, sum(moments) / 2) < 1e-13
    np.testing.assert_array_equal(held.targets, jnp.tile(targets, 2))


@pytest.mark.parametrize("m_step", specs.M_STEPS)
def test_a_sequence_twice_is_a_sequence_once(x64, m_step):
    params, inputs, targets = random_problem(1, length=30)
    rule, names, _ = specs.M_STEPS[m_step]
    rates = {"value_rate": 0.3, "ridge": 0.1, "damping": 1.0, "statistics_rate": 1.0}
    algorithm = em(rule(*(rates[name] for name in names)), frame(), mix=DENSE)
    once = Batch(inputs, targets)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), once)
    step = jax.jit(algorithm.step)
    (one, _), (two, _) = (
        step(algorithm.init(params), batch, None) for batch in (once, twice)
    )
    assert relative_error(two.params, one.params) < 1e-13


def test_more_inner_steps_cost_no_attention():
    """The operations of two more inner steps are linear in T."""
    d_x, num_classes = 5, 6

    def operations(length, inner_steps):
        params, inputs, targets = random_problem(0, length=length, dtype=np.float32)
        algorithm = em(
            m_steps.gradient(0.1),
            frame(),
            inner_steps=inner_steps,
            mix=functools.partial(gradients.mix_by_autodiff, causal=False),
        )
        jaxpr = jax.make_jaxpr(algorithm.step)(
            algorithm.init(params), Batch(inputs, targets), None
        )
        return multiplications(jaxpr.jaxpr)

    extra = {n: operations(n, 3) - operations(n, 1) for n in (100, 200, 400)}
    assert 0 < extra[100] <= 2 * 100 * 4 * d_x * num_classes
    assert extra[200] == 2 * extra[100]
    assert extra[400] == 4 * extra[100]
    assert operations(400, 1) > 10 * operations(100, 1)  # attention is what it counts


def multiplications(jaxpr):
    """Of all matrix products, loops counted as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            total += times * multiplications(inner)
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            of_sum = np.prod([left[axis] for axis in summed])
            total += int(np.prod(equation.outvars[0].aval.shape) * of_sum)
    return total


def test_online_em_learns_from_fresh_sequences_what_one_would_overfit():
    """Bounds averaged over steps against the bound of each step's own sequence."""
    task = sticky(
        length=65,
        num_symbols=4,
        d_x=8,
        stay=0.7,
        embedding_key=jax.random.key(0),
    )

    @jax.jit
    def trained(key, statistics_rate):
        keys = jax.random.split(key, 3)
        params = attention.init_params(keys[0], d_x=8, d_k=4, d_v=6, num_classes=4)
        rule = m_steps.majorised(1e-2, 1.0, statistics_rate)
        algorithm = em(rule, frame(0.1, 0.1), mix=DENSE)

        def step(state, key):
            return algorithm.step(state, task.sample(key), key)

        state, _ = jax.lax.scan(
            step, algorithm.init(params), jax.random.split(keys[1], 60)
        )

        def distance(key):
            batch = task.sample(key)
            mask = attention.causal_mask(64)
            logit = attention.forward(state.params, batch.inputs, mask).logit
            return losses.kl_to_bayes(task.bayes(batch), logit)

        return jnp.mean(jax.lax.map(distance, jax.random.split(keys[2], 20)))

    keys = jax.random.split(jax.random.key(1), 8)
    online, alone = (
        np.array([trained(key, jnp.float32(rate)) for key in keys])
        for rate in (0.05, 1.0)
    )
    low, high = stats.paired_difference(online, alone).ci95
    assert high < -0.02, (low, high)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frame_roles": ("query", "key")}, "role='output': nothing moves it"),
        (
            {"frame_roles": ("query", "key", "value", "output")},
            "role='value': moved by 'm_step' and 'frame'",
        ),
        ({"frame_roles": ("query", "keys", "output")}, "role='keys' of 'frame': must"),
        ({"still": ("query",)}, "role='query': moved by 'frame' and 'still'"),
        (
            {"shared": ("values",)},
            "role='values' of 'shared': must be one of query, key, value",
        ),
    ],
)
def test_a_role_must_be_moved_once(changes, message):
    with pytest.raises(roles.RoleError, match=message):
        em(m_steps.gradient(0.1), optax.sgd(0.1), **changes)


def test_a_role_may_rest_or_be_shared_if_said_so(x64):
    params, inputs, targets = random_problem(0)
    batch = Batch(inputs, targets)
    algorithm = em(
        m_steps.gradient(0.5),
        optax.sgd(0.25),
        frame_roles=("value", "key"),
        still=("query", "output"),
        shared=("value",),
        mix=DENSE,
    )
    state, _ = jax.jit(algorithm.step)(algorithm.init(params), batch, None)
    gradient = jax.jit(
        functools.partial(gradients.by_autodiff, wiring=gradients.Wiring(causal=True))
    )
    after_m = params._replace(w_v=params.w_v - 0.5 * gradient(params, batch)[1].w_v)
    _, second = gradient(after_m, batch)
    expected = after_m._replace(
        w_v=after_m.w_v - 0.25 * second.w_v, w_k=after_m.w_k - 0.25 * second.w_k
    )
    assert relative_error(state.params, expected) < 1e-13
    for name in ("w_q", "w_o", "b_o"):
        np.testing.assert_array_equal(
            getattr(state.params, name), getattr(params, name)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"order": "together"},
            "order='together': must be one of alternating, simultaneous",
        ),
        ({"inner_steps": 0}, "inner_steps=0: must be 1 or more"),
    ],
)
def test_what_em_cannot_do_is_said(changes, message):
    with pytest.raises(ValueError, match=message):
        em(m_steps.gradient(0.1), frame(), **changes)


@pytest.mark.parametrize("optimizer", specs.OPTIMIZERS)
def test_any_optimizer_can_be_the_frame(optimizer):
    params, inputs, targets = random_problem(0, dtype=np.float32)
    algorithm = em(
        m_steps.majorised(0.1),
        specs.OPTIMIZERS[optimizer](0.01),
        mix=DENSE,
    )
    with jax.numpy_dtype_promotion("standard"):  # Adam's own arithmetic
        curve, _ = jax.jit(functools.partial(run, algorithm, steps=10))(
            params, Batch(inputs, targets)
        )
    assert curve[-1] < curve[0] - 0.1


def test_seeds_side_by_side_are_seeds_one_by_one(x64):
    algorithm = em(m_steps.majorised(0.1), frame())
    problems = [random_problem(seed) for seed in range(3)]
    params, inputs, targets = jax.tree.map(lambda *x: jnp.stack(x), *problems)

    def trained(params, inputs, targets):
        return run(algorithm, params, Batch(inputs, targets), 5)[1]

    together = jax.jit(jax.vmap(trained))(params, inputs, targets)
    one_by_one = jax.jit(lambda *all_: jax.lax.map(lambda one: trained(*one), all_))
    assert relative_error(together, one_by_one(params, inputs, targets)) < 1e-11
