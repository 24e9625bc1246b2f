"""Schedules: parity with the authors' script, and what each of them moves."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import random_problem, relative_error

from jaxattn.algorithms import SPECS, HeadModel, descent, gradients, roles, specs
from jaxattn.algorithms.em import ORDERS, em, fix_attention
from jaxattn.analysis import stats
from jaxattn.tasks import sticky
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, losses, m_steps

AUTHORS = {
    "sgd": descent.gradient(optax.sgd(0.01)),
    "em": descent.two_timescale(routing_rate=0.01, value_rate=0.1, output_rate=0.01),
}


def run(algorithm, params, batch, steps):
    """Losses before each update, and the parameters after the last."""

    def step(state, key):
        state, info = algorithm.step(state, batch, key)
        return state, info.loss

    keys = jax.random.split(jax.random.key(0), steps)
    state, curve = jax.lax.scan(step, algorithm.init(params), keys)
    return curve, state.params


@pytest.fixture(scope="module")
def retraced(references):
    """A reference run again: seed -> arm -> losses and final metrics."""

    def again(arm, steps, params, batch):
        curve, trained = run(AUTHORS[arm], params, batch, steps)
        mask = attention.causal_mask(len(batch.inputs))
        logit = attention.readout(trained, batch.inputs, mask).logit
        final = (
            losses.cross_entropy(logit, batch.targets),
            losses.predictive_entropy(logit),
            losses.accuracy(logit, batch.targets),
        )
        return curve, final

    program = jax.jit(again, static_argnums=(0, 1))

    @functools.cache
    def both(seed, steps):
        with ThreadPoolExecutor(2) as pool:
            results = pool.map(
                lambda arm: program(arm, steps, *references[seed][:2]), AUTHORS
            )
            return jax.tree.map(np.asarray, dict(zip(AUTHORS, results, strict=True)))

    return both


@pytest.mark.parametrize("arm", AUTHORS)
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        ("42", 40),
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


def test_every_way_to_the_gradient_gives_the_same_trajectory(x64):
    params, inputs, targets = random_problem(0, length=300, scale=0.5)
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
                            gradient, wiring=gradients.Wiring(causal=True)
                        ),
                    ),
                    steps=200,
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


def built(arm, rates, name):
    model = HeadModel(
        functools.partial(
            gradients.GRADIENTS[name], wiring=gradients.Wiring(causal=True)
        ),
        functools.partial(gradients.MIXES[name], causal=True),
        steps=100,
    )
    return SPECS[arm["algorithm"]].head(arm, rates, model)


def rates_of(arm, rates):
    return {name: rates[name] for name in SPECS[arm["algorithm"]].rates(arm)}


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


# --- EM


def frame(routing_rate=0.125, output_rate=0.25):
    return roles.by_role(
        {("query", "key"): optax.sgd(routing_rate), "output": optax.sgd(output_rate)},
        still=("value",),
    )


@pytest.mark.parametrize("sequences", [0, 3])
def test_em_with_one_gradient_step_at_the_same_point_is_the_authors_schedule(sequences):
    """Bit for bit, over 30 steps; `sequences`: of a batch, 0 for no such axis."""
    params, inputs, targets = random_problem(0, length=150, dtype=np.float32)
    batch = Batch(inputs, targets)
    if sequences:
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * sequences), batch)
        batch = batch._replace(inputs=batch.inputs.at[1].multiply(2))
    theirs = descent.two_timescale(routing_rate=0.125, value_rate=0.5, output_rate=0.25)
    ours = em(m_steps.gradient(0.5), frame(), order="simultaneous")
    (curve, trained), (expected_curve, expected) = (
        jax.jit(functools.partial(run, algorithm, steps=30))(params, batch)
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


@pytest.mark.parametrize(
    "order", ["alternating", pytest.param("simultaneous", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("m_step", specs.M_STEPS)
def test_every_way_to_mix_gives_the_same_em(x64, m_step, order):
    params, inputs, targets = random_problem(0, length=200, scale=0.5)
    batch = Batch(inputs, targets)
    rates = {"routing_rate": 0.1, "output_rate": 0.2, "value_rate": 0.5}
    rates |= {"ridge": 0.01, "damping": 0.9, "statistics_rate": 0.5}
    arm = em_arm(m_step, order)
    rates = rates_of(arm, rates)
    (curve, trained), *others = (
        jax.jit(functools.partial(run, built(arm, rates, name), steps=50))(
            params, batch
        )
        for name in gradients.MIXES
    )
    assert curve[-1] < curve[0] - 0.01
    for other_curve, other in others:
        assert relative_error(other_curve, curve) < 1e-9
        assert relative_error(other, trained) < 1e-9


def test_holding_attention(x64):
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
    for n, x in enumerate(sequences):
        weight = attention.forward(params, x, mask).weight
        rows = slice(30 * n, 30 * (n + 1))
        assert relative_error(held.mixed[rows], weight @ x) < 1e-13
        share = weights[n] / weights[n].sum() / 2
        assert relative_error(held.share[rows], share) < 1e-14
        moments.append(x.T @ (weight.sum(axis=0)[:, None] * x))
    assert relative_error(held.moment, sum(moments) / 2) < 1e-13
    np.testing.assert_array_equal(held.targets, jnp.tile(targets, 2))


@pytest.mark.parametrize("m_step", specs.M_STEPS)
def test_a_sequence_twice_is_a_sequence_once(x64, m_step):
    params, inputs, targets = random_problem(1, length=30)
    rule, names, _ = specs.M_STEPS[m_step]
    rates = {"value_rate": 0.3, "ridge": 0.1, "damping": 1.0, "statistics_rate": 1.0}
    algorithm = em(rule(*(rates[name] for name in names)), frame())
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
        algorithm = em(m_steps.majorised(1e-2, 1.0, statistics_rate), frame(0.1, 0.1))

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


# --- roles


def test_roles_cover_the_parameters_once():
    params = attention.Params(*map(np.zeros, (1, 2, 3, 4, 5)))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    expected = ["query", "key", "value", "output", "output"]
    assert [roles.role_of(path) for path in paths] == expected
    assert set(expected) == set(roles.ROLES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frame_roles": ("query", "key")}, "role 'output': nothing moves it"),
        (
            {"frame_roles": ("query", "key", "value", "output")},
            "role 'value': moved by 'm_step' and 'frame'",
        ),
        ({"frame_roles": ("query", "keys", "output")}, "frame: role 'keys'; must"),
        ({"still": ("query",)}, "role 'query': moved by 'frame' and 'still'"),
        (
            {"shared": ("values",)},
            "shared: role 'values'; must be one of query, key, value",
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


def test_rules_by_role_move_only_what_they_name(x64):
    params, inputs, targets = random_problem(0)
    tx = roles.by_role({"value": optax.sgd(0.5)}, still=("query", "key", "output"))
    algorithm = descent.gradient(tx)
    state, _ = jax.jit(algorithm.step)(
        algorithm.init(params), Batch(inputs, targets), None
    )
    assert relative_error(state.params.w_v, params.w_v) > 1e-3
    still = state.params._replace(w_v=params.w_v)
    jax.tree.map(np.testing.assert_array_equal, still, params)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"query": 1}, "role 'key': nothing moves it"),
        ({("query", "key"): 1, "key": 1, "value": 1, "output": 1}, "role 'key': moved"),
        ({("query", "kye"): 1}, "role 'kye'; must be one of query, key, value, output"),
    ],
)
def test_rules_by_role_are_checked(parts, message):
    with pytest.raises(roles.RoleError, match=message):
        roles.by_role({roles: optax.sgd(rate) for roles, rate in parts.items()})


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
        mix=functools.partial(gradients.mix_by_autodiff, causal=True),
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


@pytest.mark.parametrize(
    "wiring",
    [
        gradients.Wiring(False, value_norm=True),
        gradients.Wiring(True, dropout_rate=0.3),
        gradients.Wiring(True, value_norm=True, dropout_rate=0.3),
    ],
)
def test_every_way_to_the_gradient_of_another_wiring_is_the_same(wiring):
    """Also which weights are dropped."""
    params, inputs, targets = random_problem(0, length=40, dtype=np.float32)
    batch = Batch(inputs, targets, jnp.arange(1.0, 41))
    found = {
        name: jax.jit(functools.partial(way, wiring=wiring))(
            params, batch, jax.random.key(7)
        )
        for name, way in gradients.GRADIENTS.items()
    }
    plain = gradients.by_autodiff(params, batch, wiring=gradients.Wiring(wiring.causal))
    for loss, gradient in found.values():
        assert loss == pytest.approx(float(found["autodiff"][0]), rel=1e-5)
        assert relative_error(gradient, found["autodiff"][1]) < 2e-5
        assert relative_error(gradient, plain[1]) > 0.05


def test_each_step_and_sequence_drops_other_weights():
    params, inputs, targets = random_problem(0, length=20, dtype=np.float32)
    wired = functools.partial(
        gradients.by_streaming, wiring=gradients.Wiring(True, dropout_rate=0.5)
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
