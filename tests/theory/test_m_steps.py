"""M-steps: their theorems hold on hundreds of random problems."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from problems import central_difference, random_direction, relative_error

from jaxattn.theory import m_steps
from jaxattn.theory.attention import Params
from jaxattn.theory.m_steps import Held

PROBLEMS = 150  # of each shape
# R, d_x, d_v, C: two classes, where the bound is tight; fewer rows than inputs; ...
SHAPES = [(12, 3, 2, 2), (4, 9, 3, 3), (30, 20, 15, 8), (16, 5, 6, 4)]


@pytest.fixture(autouse=True)
def _truth(x64):
    return


def draw(rng, shape, *, bias):
    """A head and sequences under fixed attention, with all that may go wrong."""
    rows, d_x, d_v, num_classes = shape

    def normal(*size):
        return rng.normal(size=size)

    def low_rank(*size):
        rank = rng.integers(1, min(size) + 1)
        return normal(size[0], rank) @ normal(rank, size[1])

    def scaled(array):
        return array * 10 ** rng.uniform(-2, 1.3)

    any_rank = (normal, low_rank)
    share = rng.random(rows) * (rng.random(rows) < rng.choice([0.3, 1.0]))
    share[0] += 1e-3
    params = Params(
        w_q=np.zeros((d_x, 1)),
        w_k=np.zeros((d_x, 1)),
        w_v=scaled(normal(d_x, d_v)) * (rng.random() < 0.9),
        w_o=scaled(any_rank[rng.integers(2)](d_v, num_classes)),
        b_o=scaled(normal(num_classes)) if bias else None,
    )
    half_root = normal(rows, d_x)
    held = Held(
        mixed=scaled(any_rank[rng.integers(2)](rows, d_x)),
        targets=rng.integers(0, num_classes, rows),
        share=share / share.sum(),
        moment=half_root.T @ half_root,
    )
    ridge = rng.choice([0.0, 10 ** rng.uniform(-8, 1)])
    return params, held, ridge, rng.uniform(0.1, 1)


@functools.cache
def many(shape, *, bias):
    rng = np.random.default_rng(SHAPES.index(shape))
    drawn = [draw(rng, shape, bias=bias) for _ in range(PROBLEMS)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)


def moved(m_step, params, held):
    """D, and the parameters after W_V + D."""
    plan, _ = m_step.begin(m_step.init(params), params, held)
    gradient = m_steps.signals(params, held).value_gradient
    step = m_step.move(plan, params, gradient)
    return step, params._replace(w_v=params.w_v + step)


@jax.jit
@jax.vmap
def compiled_once(params, held, ridge, damping):
    step, after = moved(m_steps.majorised(ridge, damping), params, held)
    loss = functools.partial(m_steps.penalised_loss, held=held, ridge=ridge)
    value, gradient = jax.value_and_grad(loss)(params)
    promised = -jnp.vdot(gradient.w_v, step)
    return value, loss(after), promised, jnp.linalg.norm(gradient.w_v), step


def majorised_once(*problem):
    return jax.tree.map(np.asarray, compiled_once(*problem))


@pytest.mark.parametrize(
    ("shape", "bias"),
    [(shape, True) for shape in SHAPES] + [(SHAPES[0], False), (SHAPES[2], False)],
)
def test_majorised_never_raises_the_penalised_loss(shape, bias):
    params, held, ridge, damping = many(shape, bias=bias)
    before, after, promised, _, _ = majorised_once(params, held, ridge, damping)
    rounding = 1e-13 * (1 + np.abs(before))
    assert (ridge == 0).any()
    assert (ridge > 0).any()
    assert (after <= before + rounding).all()
    # More than the theorem asks: by this much at least.
    assert (after <= before - (1 - damping / 2) * promised + rounding).all()
    assert np.median(before - after) > 1e-3


def test_more_than_the_bound_allows_does_raise_it():
    """So the test above can fail: steps of 2.5 D, as from a bound 2.5 times too low."""
    params, held, ridge, _ = many(SHAPES[0], bias=False)
    before, after, *_ = majorised_once(params, held, ridge, np.full(PROBLEMS, 2.5))
    assert (after > before + 1e-6).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_majorised_stays_only_where_the_gradient_is_zero(shape):
    params, held, ridge, damping = many(shape, bias=True)
    # <G, -D> is 0 for no G but 0, in proportion to what the curvature allows.
    _, _, promised, gradient, step = majorised_once(params, held, ridge, damping)
    weighted = held.share[..., None] * held.mixed
    of_values = np.linalg.norm(np.swapaxes(held.mixed, 1, 2) @ weighted, 2, (1, 2))
    curvature = ridge + of_values * np.linalg.norm(params.w_o, 2, (1, 2)) ** 2 / 2
    assert (promised >= 0.999 * damping * gradient**2 / curvature).all()
    assert (np.linalg.norm(step, axis=(1, 2)) > 0).all()
    # And where it is 0: all rows alike, and each class as often as predicted.
    _, d_x, d_v, num_classes = shape
    balanced = Held(
        mixed=np.ones((num_classes, d_x)),
        targets=np.arange(num_classes),
        share=np.full((num_classes,), 1 / num_classes),
        moment=np.eye(d_x),
    )
    at_rest = jax.tree.map(lambda leaf: leaf[0], params)._replace(
        w_v=np.zeros((d_x, d_v)), b_o=np.zeros(num_classes)
    )
    step, _ = jax.jit(functools.partial(moved, m_steps.majorised(1e-2)))(
        at_rest, balanced
    )
    assert np.abs(step).max() < 1e-12  # in units of 1 / ridge and of curvature


@pytest.mark.parametrize("ridge", [1e-4, 1e-2, 1.0])
def test_directions_without_inputs_shrink_by_the_ridge_alone(ridge):
    """In float32 too, where a small ridge is below the rounding of the curvature."""
    rng = np.random.default_rng(0)
    params, held, *_ = draw(rng, SHAPES[2], bias=False)
    params = params._replace(w_v=rng.normal(size=params.w_v.shape))
    absent = slice(10, 20)
    mixed = 10 * rng.normal(size=held.mixed.shape)
    mixed[:, absent] = 0
    params, held = jax.tree.map(
        lambda leaf: leaf.astype(np.float32) if leaf.dtype == float else leaf,
        (params, held._replace(mixed=mixed)),
    )
    step = ridge_step(params, held, np.float32(ridge))
    np.testing.assert_allclose(step[absent], -params.w_v[absent], rtol=1e-4, atol=1e-5)


@jax.jit
def ridge_step(params, held, ridge):
    return moved(m_steps.majorised(ridge), params, held)[0]


def test_nothing_to_learn_from_moves_nothing():
    params, held, _, _ = draw(np.random.default_rng(0), SHAPES[2], bias=True)
    held = held._replace(share=np.zeros_like(held.share))
    rules = m_steps.gradient(1.0), m_steps.prototype(1.0, 0.0), m_steps.majorised(0.0)

    @jax.jit
    def steps(params, held):
        return [moved(rule, params, held)[0] for rule in rules]

    for step in steps(params, held):
        np.testing.assert_array_equal(step, 0)


@pytest.mark.parametrize(
    "shape", [*SHAPES[:2], SHAPES[3], pytest.param(SHAPES[2], marks=pytest.mark.slow)]
)
def test_majorised_reaches_the_optimum_that_a_solver_finds(shape):
    rng = np.random.default_rng(7)
    params, held, _, _ = draw(rng, shape, bias=True)
    params = jax.tree.map(lambda leaf: leaf / (1e-9 + np.abs(leaf).max()), params)
    held = held._replace(mixed=held.mixed / np.abs(held.mixed).max())
    ridge = 1e-2

    @jax.jit
    @jax.value_and_grad
    def loss(w_v):
        moving = params._replace(w_v=w_v.reshape(params.w_v.shape))
        return m_steps.penalised_loss(moving, held, ridge)

    found = scipy.optimize.minimize(
        loss,
        params.w_v.ravel(),
        jac=True,
        method="BFGS",
        options={"gtol": 1e-10, "maxiter": 5000},
    )

    @jax.jit
    def iterated(params):
        def once(_, params):
            return moved(m_steps.majorised(ridge), params, held)[1]

        return jax.lax.fori_loop(0, 3000, once, params)

    reached = np.asarray(iterated(params).w_v).ravel()
    reached_loss, start_loss = loss(reached)[0], loss(params.w_v.ravel())[0]
    assert reached_loss < start_loss - 1e-3
    assert abs(reached_loss - found.fun) < 1e-13
    assert relative_error(reached, found.x) < 1e-6


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("length", [30, 4])
def test_prototype_is_weighted_least_squares(length, ridge):
    """Fewer positions than inputs too, where it is the solution of least norm."""
    rng = np.random.default_rng(length)
    d_x, d_v, num_classes, rate = 7, 4, 5, 12.0
    inputs = rng.normal(size=(length, d_x))
    weight = rng.dirichlet(np.ones(length), size=length)
    params = Params(None, None, rng.normal(size=(d_x, d_v)), rng.normal(size=(d_v, 5)))
    usage = weight.sum(axis=0)
    held = Held(
        mixed=weight @ inputs,
        targets=rng.integers(0, num_classes, length),
        share=np.full(length, 1 / length),
        moment=inputs.T @ (usage[:, None] * inputs),
    )
    delta = np.asarray(jax.jit(m_steps.signals)(params, held).logit_gradient)
    upstream = delta @ params.w_o.T
    prototype_signal = weight.T @ upstream / usage[:, None]
    root = np.sqrt(usage)[:, None]
    expected, *_ = np.linalg.lstsq(
        np.concatenate([root * inputs, np.sqrt(ridge) * np.eye(d_x)]),
        np.concatenate([-rate * root * prototype_signal, np.zeros((d_x, d_v))]),
    )
    rule = m_steps.prototype(rate, ridge)
    step, _ = jax.jit(functools.partial(moved, rule))(params, held)
    assert relative_error(step, expected) < 1e-11


def test_signals_are_the_gradients_of_their_loss():
    params, held, _, _ = draw(np.random.default_rng(3), SHAPES[2], bias=True)
    signals = jax.jit(m_steps.signals)(params, held)

    @jax.jit
    @jax.value_and_grad
    def loss(w_v):
        return m_steps.signals(params._replace(w_v=w_v), held).loss

    assert relative_error(signals.value_gradient, loss(params.w_v)[1]) < 1e-13
    direction = np.asarray(random_direction(0, params.w_v))
    slope = float(np.vdot(signals.value_gradient, direction))
    found = central_difference(lambda w_v: loss(w_v)[0], params.w_v, direction)
    assert found == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_online_step_minimises_the_average_of_all_bounds(bias):
    """The bounds written out one by one; between them the whole head moves."""
    rng = np.random.default_rng(5)
    rate, ridge = 0.3, 1e-2
    m_step = m_steps.majorised(ridge, 1.0, rate)
    signals, begin = jax.jit(m_steps.signals), jax.jit(m_step.begin)
    memory, history = None, []
    for count in range(1, 6):
        params, held, _, _ = draw(rng, SHAPES[3], bias=bias)
        params = params._replace(w_o=rng.normal(size=params.w_o.shape))
        memory = m_step.init(params) if memory is None else memory
        plan, memory = begin(memory, params, held)
        new = max(rate, 1 / count)
        history = [(w * (1 - new), *rest) for w, *rest in history]
        history.append((new, params, held, signals(params, held).logit_gradient))
    gradient = signals(params, held).value_gradient
    after = params.w_v + np.asarray(jax.jit(m_step.move)(plan, params, gradient))

    @jax.jit
    @jax.grad
    def slope(w_v):
        """Of the average of all bounds."""
        total = ridge / 2 * jnp.sum(w_v**2)
        for weight, old, held, delta in history:

            def logit(p, held=held):
                bias = 0 if p.b_o is None else p.b_o[None]
                return held.mixed @ p.w_v @ p.w_o + bias

            change = logit(params._replace(w_v=w_v)) - logit(old)
            centred = change - change.mean(axis=1, keepdims=True)
            bend = jnp.sum(held.share[:, None] * centred**2) / 4
            total += weight * (jnp.vdot(delta, change) + bend)
        return total

    assert sum(weight for weight, *_ in history) == pytest.approx(1)
    assert np.abs(slope(after)).max() < 1e-12 * np.abs(slope(params.w_v)).max()


def test_a_statistics_rate_of_one_remembers_nothing():
    params, held, _, _ = draw(np.random.default_rng(1), SHAPES[2], bias=True)
    m_step = m_steps.majorised(1e-3, 1.0, 1.0)

    @jax.jit
    def step(memory):
        gradient = m_steps.signals(params, held).value_gradient
        return m_step.move(m_step.begin(memory, params, held)[0], params, gradient)

    memory = jax.tree.map(np.asarray, m_step.init(params))
    other = jax.tree.map(lambda leaf: leaf + 3.0, memory)
    assert relative_error(step(memory), step(other)) < 1e-12


@pytest.mark.parametrize("name", ["prototype", "majorised"])
def test_side_by_side_no_stack_of_matrices_is_decomposed(name):
    """On CPU two stacks at once may wait for each other forever."""
    rule = {
        "prototype": m_steps.prototype(0.1, 1e-3),
        "majorised": m_steps.majorised(1e-3),
    }[name]
    params, held, *_ = many(SHAPES[0], bias=False)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda p, h: moved(rule, p, h)[0]))(params, held)
    ranks = list(ranks_decomposed(jaxpr.jaxpr))
    assert len(ranks) == {"prototype": 1, "majorised": 2}[name]
    if jax.default_backend() == "cpu":
        assert set(ranks) == {2}


def ranks_decomposed(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "eigh":
            yield equation.invars[0].aval.ndim
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from ranks_decomposed(inner)


@pytest.mark.parametrize("name", ["gradient", "prototype", "majorised"])
def test_an_inner_step_is_linear_in_the_positions(name):
    """Twice the positions, twice the operations: no T x T work."""
    m_step = {
        "gradient": m_steps.gradient(0.1),
        "prototype": m_steps.prototype(0.1, 1e-3),
        "majorised": m_steps.majorised(1e-3),
    }[name]

    def operations(rows):
        rng = np.random.default_rng(0)
        params, held, *_ = draw(rng, (rows, 20, 15, 8), bias=False)
        function = jax.jit(lambda p, h: moved(m_step, p, h)[1])
        return function.lower(params, held).compile().cost_analysis()["flops"]

    small, middle, large = operations(1000), operations(2000), operations(4000)
    assert large - middle == pytest.approx(2 * (middle - small), rel=0.01)


@pytest.mark.parametrize(
    ("rule", "numbers", "message"),
    [
        (m_steps.majorised, {"ridge": -1}, "ridge=-1: must be 0 or more"),
        (m_steps.majorised, {"ridge": np.nan}, "ridge=nan: must be 0 or more"),
        (m_steps.majorised, {"ridge": 0, "damping": 0}, "damping=0: must be a number"),
        (
            m_steps.majorised,
            {"ridge": 0, "statistics_rate": 1.5},
            "statistics_rate=1.5: must be a number above 0, at most 1",
        ),
        (m_steps.prototype, {"rate": 1, "ridge": -1e-3}, "ridge=-0.001: must be 0 or"),
    ],
)
def test_numbers_that_no_m_step_has(rule, numbers, message):
    with pytest.raises(ValueError, match=message):
        rule(**numbers)
