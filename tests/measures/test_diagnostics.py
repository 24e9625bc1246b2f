"""Diagnostics against their definitions, where they are defined and where not."""

import inspect
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from problems import random_mask, random_problem

from jaxattn.kernels import streaming
from jaxattn.measures import diagnostics
from jaxattn.theory import attention, laws

pytestmark = pytest.mark.usefixtures("x64")

# Each function as one program: op by op there are several hundred to compile. That both
# agree is a test below.
_STATIC = {"dimension": "share", "leading_share": "axes", "key_null": ("d_k", "draws")}
compiled = types.SimpleNamespace(
    **{
        name: jax.jit(function, static_argnames=_STATIC.get(name))
        for name, function in inspect.getmembers(diagnostics, inspect.isfunction)
    }
)
compatibility, advantage = map(jax.jit, (laws.compatibility, laws.advantage))


@pytest.fixture(scope="module")
def head():
    """A head: row 2 is fully masked, query 0 has one source, query 5 is one-hot."""
    mask = np.array(random_mask(0, 9))
    mask[2] = False
    mask[0] = np.arange(9) == 4
    mask[5] = True
    sure = jnp.where(np.arange(9) == 3, 1e4, 0.0)

    @jax.jit
    def changed(params, inputs, targets):
        forward = attention.forward(params, inputs)
        weight = attention.weights(forward.score.at[5].set(sure), mask)
        forward = forward._replace(weight=weight)
        logit = attention.read_out(params, weight @ forward.value)
        delta = laws.logit_gradient(logit, targets)
        return forward, laws.upstream_gradient(delta, params.w_o)

    with jax.enable_x64(True):
        return *changed(*random_problem(0, length=9)), mask


def advantage_of(head):
    forward, upstream, _ = head
    return advantage(forward.weight, compatibility(upstream, forward.value))


def test_relative_entropy(head):
    forward, _, mask = head
    value, valid = compiled.relative_entropy(forward.weight, mask)
    for i, row in enumerate(np.asarray(forward.weight)):
        count = mask[i].sum()
        assert valid[i] == (count > 1)
        if valid[i]:
            p = row[row > 0]
            entropy = -(p * np.log(p)).sum()
            np.testing.assert_allclose(value[i], entropy / math.log(count), atol=1e-12)
    assert not valid[0]
    assert not valid[2]
    assert valid[5]
    assert value[5] == 0


def test_relative_entropy_is_what_taps_say():
    params, inputs, _ = random_problem(1, length=11, d_k=3, d_v=3)
    f = attention.forward(params, inputs, attention.causal_mask(11))
    ours = compiled.relative_entropy(f.weight, attention.causal_mask(11))

    def loss(tap):
        context = streaming.attend(f.query, f.key, f.value, causal=True, tap=tap)
        return jnp.sum(context)

    tap = streaming.zero_tap(11, dtype=jnp.float64)
    theirs = jax.grad(loss)(tap).relative_entropy
    np.testing.assert_allclose(compiled.mean(ours).value, theirs, rtol=1e-10)


def test_effective_sources(head):
    effective = compiled.effective_sources(head[0].weight)
    assert effective[2] == 0
    np.testing.assert_allclose(effective[np.array([0, 5])], 1)
    np.testing.assert_allclose(compiled.effective_sources(jnp.full((1, 7), 1 / 7)), 7)


def test_routing_pressure_is_a_variance(head):
    forward, upstream, _ = head
    pressure = compiled.routing_pressure(forward.weight, advantage_of(head))
    b = np.asarray(laws.compatibility(upstream, forward.value))
    a = np.asarray(forward.weight)
    middle = (a * b).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        pressure, (a * (b - middle) ** 2).sum(axis=1), atol=1e-14
    )
    assert pressure[5] == 0
    assert np.abs(advantage_of(head)[5]).max() > 1e-3


def test_drift():
    sure, other = jnp.eye(3), jnp.roll(jnp.eye(3), 1, axis=1)
    np.testing.assert_array_equal(compiled.drift(sure, other), 1)
    np.testing.assert_array_equal(compiled.drift(sure, sure), 0)
    even = jnp.full((3, 3), 1 / 3)
    np.testing.assert_allclose(compiled.drift(even, sure), 2 / 3)


def test_usage(head):
    usage = np.asarray(laws.column_usage(head[0].weight))
    size, share = len(usage), usage / usage.sum()
    used = share[share > 0]
    entropy = -(used * np.log(used)).sum() / math.log(size)
    value, valid = compiled.usage_entropy(jnp.array(usage))
    np.testing.assert_allclose(value, entropy, atol=1e-12)
    assert valid
    pairs = np.abs(usage[:, None] - usage[None]).sum() / (2 * size * usage.sum())
    np.testing.assert_allclose(
        compiled.usage_gini(jnp.array(usage)).value, pairs, atol=1e-12
    )
    one = jnp.zeros(5).at[2].set(3.0)
    np.testing.assert_allclose(compiled.usage_gini(one).value, 0.8)
    np.testing.assert_allclose(compiled.usage_entropy(one).value, 0)
    np.testing.assert_allclose(compiled.usage_entropy(jnp.ones(5)).value, 1)
    for nothing in (compiled.usage_entropy, compiled.usage_gini):
        assert not nothing(jnp.zeros(5)).valid
    assert not compiled.usage_entropy(jnp.ones(1)).valid


def test_specialisation(head):
    forward, upstream, _ = head
    a, u = np.asarray(forward.weight), np.array(upstream)
    value, valid = compiled.specialisation(forward.weight, upstream)
    for j in range(9):
        above = np.linalg.norm((a[:, j, None] * u).sum(axis=0))
        below = (a[:, j] * np.linalg.norm(u, axis=1)).sum()
        assert valid[j] == (below > 0)
        if valid[j]:
            np.testing.assert_allclose(value[j], above / below, atol=1e-12)
    ask = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    look = jnp.eye(4)[:, :3].at[1].set([1.0, 0.0, 0.0])
    value, valid = compiled.specialisation(look, ask)
    np.testing.assert_array_equal(valid, [True, False, True])
    np.testing.assert_allclose(value, [0, 0, 1], atol=1e-15)


def test_orthogonality_against_every_pair():
    keys = np.random.default_rng(0).normal(size=(7, 3))
    keys[2] = 0
    keys[4] *= 1e-200  # short, and yet it points somewhere
    kept = np.delete(keys, 2, axis=0)
    kept /= np.abs(kept).max(axis=1, keepdims=True)
    unit = kept / np.linalg.norm(kept, axis=1, keepdims=True)
    cosines = [unit[j] @ unit[k] for j in range(6) for k in range(6) if j != k]
    found = compiled.orthogonality(jnp.array(keys))
    np.testing.assert_allclose(found.absolute.value, np.abs(cosines).mean(), atol=1e-12)
    np.testing.assert_allclose(found.signed.value, np.mean(cosines), atol=1e-12)


def test_orthogonality_of_axes_and_of_one():
    axes = jnp.concatenate([jnp.eye(3), -jnp.eye(3)[:1]])
    found = compiled.orthogonality(axes)
    np.testing.assert_allclose(found.absolute.value, 1 / 6)  # one pair of six
    np.testing.assert_allclose(found.signed.value, -1 / 6)
    for few in (jnp.ones((1, 3)), jnp.zeros((4, 3)), jnp.eye(3)[:1]):
        assert not compiled.orthogonality(few).absolute.valid


def test_the_null_of_keys_is_that_of_random_directions():
    """Of orthogonal inputs; E|cos| in d dimensions is Γ(d/2) / √π Γ((d+1)/2)."""
    null = compiled.key_null(jax.random.key(0), jnp.eye(30), 5, draws=200)
    expected = math.gamma(2.5) / (math.sqrt(math.pi) * math.gamma(3))
    assert null.absolute.value.shape == (200,)
    np.testing.assert_allclose(null.absolute.value.mean(), expected, rtol=0.01)
    np.testing.assert_allclose(null.signed.value.mean(), 0, atol=0.01)


def test_query_key_alignment():
    key = jnp.array([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    query = jnp.array([[5.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, -1.0]])
    weight = jnp.array([[1.0, 0, 0], [0.5, 0.5, 0], [1, 0, 0], [0.2, 0.4, 0.4]])
    value, valid = compiled.query_key_alignment(weight, query, key)
    np.testing.assert_array_equal(valid, [True, True, False, True])
    np.testing.assert_allclose(value, [1, math.sqrt(0.5), 0, -2 / 3], atol=1e-15)
    blind = compiled.query_key_alignment(jnp.eye(3)[2:], query[:1], key)
    assert not blind.valid.any()


def test_manifold_of_a_trajectory_has_one_basis():
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(6, 8, 2)) @ rng.normal(size=(2, 5)) + 3.0
    found = compiled.manifold(jnp.array(steps.reshape(-1, 5)))
    covariance = np.cov(steps.reshape(-1, 5).T, bias=True)
    eigenvalues = np.linalg.eigvalsh(covariance)[::-1]
    np.testing.assert_allclose(found.variance, eigenvalues, atol=1e-12)
    np.testing.assert_allclose(found.axes @ found.axes.T, np.eye(5), atol=1e-12)
    along = np.asarray(compiled.coordinates(found, jnp.array(steps)))
    assert along.shape == (6, 8, 5)
    np.testing.assert_allclose(along[..., 2:], 0, atol=1e-12)
    np.testing.assert_allclose(
        np.asarray(found.centre) + along @ np.asarray(found.axes), steps, atol=1e-12
    )
    share = compiled.explained(found.variance)
    np.testing.assert_allclose(share.value[:2].sum(), 1)
    assert compiled.dimension(found.variance, 0.95) in (1, 2)


def test_signs_of_axes_do_not_depend_on_who_computes():
    points = np.random.default_rng(1).normal(size=(20, 4))
    axes = compiled.manifold(jnp.array(points)).axes
    again = compiled.manifold(jnp.array(points[::-1])).axes
    np.testing.assert_allclose(axes, again, atol=1e-12)
    assert (np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1) > 0).all()


@pytest.mark.parametrize(
    ("variance", "ratio", "dimension"),
    [
        ([1.0, 0.0, 0.0], 1, 1),
        ([1.0, 1.0, 1.0], 3, 3),
        ([0.96, 0.03, 0.01], 1 / (0.96**2 + 0.03**2 + 0.01**2), 1),
        ([0.9, 0.05, 0.05], 1 / (0.81 + 0.005), 2),
        ([0.0, 0.0, 0.0], 0, 0),
    ],
)
def test_how_many_dimensions(variance, ratio, dimension):
    variance = jnp.array(variance)
    np.testing.assert_allclose(compiled.participation_ratio(variance), ratio)
    assert compiled.dimension(variance, 0.95) == dimension
    assert compiled.explained(variance).valid.all() == (dimension > 0)


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^share=1.5: must be above 0, at most 1"):
        compiled.dimension(jnp.ones(3), 1.5)


def all_of_them(weight, upstream, forward, mask):
    """A number that depends on every diagnostic of weights and signals."""
    advantage = laws.advantage(weight, laws.compatibility(upstream, forward.value))
    answers = [
        diagnostics.mean(diagnostics.relative_entropy(weight, mask)),
        diagnostics.usage_entropy(laws.column_usage(weight)),
        diagnostics.usage_gini(laws.column_usage(weight)),
        diagnostics.mean(diagnostics.specialisation(weight, upstream)),
        diagnostics.mean(
            diagnostics.query_key_alignment(weight, forward.query, forward.key)
        ),
    ]
    others = [
        diagnostics.effective_sources(weight).mean(),
        diagnostics.routing_pressure(weight, advantage).sum(),
    ]
    return sum(answer.value for answer in answers) + sum(others)


def test_gradients_are_right_where_there_are_any(head):
    """By the scores, of a fully masked row, a one-hot one and one with one source."""
    forward, upstream, mask = head
    weight = np.asarray(forward.weight)
    score = np.where(weight > 1e-12, np.log(weight + 1e-300), -50.0)

    @jax.jit
    def of(score, upstream):
        weight = attention.weights(score, mask)
        return all_of_them(weight, upstream, forward, mask)

    # Query 5 has a tiny signal: larger steps are not small beside it.
    steps = {"eps": 1e-6, "rtol": 1e-7, "atol": 1e-7}
    check_grads(of, (score, upstream), order=1, modes=["rev"], **steps)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-300])
def test_nothing_is_ever_nan(head, scale):
    forward, upstream, mask = head
    for weight in (forward.weight, np.zeros((9, 9)), np.eye(9)):
        numbers = slopes(weight, scale * upstream, forward, mask)
        for number in jax.tree.leaves(numbers):
            assert np.isfinite(number).all()
    still = compiled.manifold(np.full((5, 3), 2.0))
    assert all(np.isfinite(leaf).all() for leaf in still)
    assert compiled.dimension(still.variance, 0.9) == 0


slopes = jax.jit(jax.value_and_grad(all_of_them, (0, 1)))


def test_under_jit_and_vmap(head):
    forward, upstream, mask = head
    bare = all_of_them(forward.weight, upstream, forward, mask)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (forward, upstream))
    many = jax.jit(jax.vmap(lambda f, u: all_of_them(f.weight, u, f, mask)))(*stack)
    np.testing.assert_allclose(many, bare, rtol=1e-12)


@jax.jit
def gated(problem, mask):
    """Gate, spread, and the score gradient that they multiply to."""
    params, inputs, targets = problem
    f = attention.forward(params, inputs, mask)
    delta = laws.logit_gradient(f.logit, targets)
    b = laws.compatibility(laws.upstream_gradient(delta, params.w_o), f.value)
    gradient = laws.score_gradient(f.weight, laws.advantage(f.weight, b))
    gate = diagnostics.gate(f.weight, b, mask)
    spread = diagnostics.advantage_spread(b, mask)
    return gate, spread, jnp.sum(jnp.abs(gradient), axis=1)


def test_gate_times_spread_is_the_score_gradient():
    """On random heads with fully masked rows."""
    for seed in range(20):
        mask = random_mask(seed, 12)
        gate, spread, force = gated(random_problem(seed, scale=2.0), mask)
        np.testing.assert_allclose(gate.value * spread, force, atol=1e-15)
        choice = mask.sum(axis=1) > 1
        np.testing.assert_array_equal(gate.valid, choice)
        assert (spread[~choice] == 0).all()


def test_gate_is_1_for_equal_shares_and_0_for_one_hot():
    b = np.random.default_rng(0).normal(size=(4, 5))
    equal = np.full((4, 5), 0.2)
    np.testing.assert_allclose(compiled.gate(equal, b).value, 1)
    one_hot = np.eye(5)[:4]
    assert (compiled.gate(one_hot, b).value == 0).all()
    # Above 1 on the best and the worst: the mean is far from either.
    ends = np.tile([0.5, 0, 0, 0, 0.5], (4, 1))
    b = np.tile([-1.0, 0, 0, 0, 1], (4, 1))
    assert compiled.gate(ends, b).value[0] == pytest.approx(1 / 0.4)
    alike = np.ones((4, 5))
    assert not compiled.gate(equal, alike).valid.any()
    slope = jax.jit(jax.grad(lambda w, b: diagnostics.gate(w, b).value.sum(), (0, 1)))
    for weight in (equal, one_hot):
        assert all(np.isfinite(leaf).all() for leaf in slope(weight, alike))


def test_leading_share_is_that_of_the_principal_axes():
    points = np.random.default_rng(0).normal(size=(30, 4))
    variance = compiled.manifold(points).variance
    share = compiled.explained(variance).value
    for axes in (1, 2, 4):
        found = compiled.leading_share(points, axes)
        assert found.value == pytest.approx(float(share[:axes].sum()), rel=1e-12)
    line = points[:1] * np.arange(30.0)[:, None]
    assert compiled.leading_share(line, 1).value == pytest.approx(1)
    assert not compiled.leading_share(np.ones((30, 4)), 2).valid
    several = jax.jit(jax.vmap(lambda p: diagnostics.leading_share(p, 2).value))(
        points.reshape(3, 10, 4)
    )
    assert ((several > 0.5) & (several < 1)).all()


def test_a_share_of_no_axes_is_refused():
    """[-0:] is all of them."""
    for axes in (0, -1):
        with pytest.raises(ValueError, match=rf"^axes={axes}: must be 1 or more$"):
            diagnostics.leading_share(jnp.ones((5, 3)), axes)


def test_effective_sources_do_not_hide_a_nan():
    weight = jnp.array([[0.5, 0.5], [jnp.nan, 0.5], [0.0, 0.0]])
    found = compiled.effective_sources(weight)
    assert found[0] == pytest.approx(2)
    assert np.isnan(found[1])
    assert found[2] == 0


def clouds(dtype):
    """Points without extent, and with; all about as large as the rounding of others."""
    rng = np.random.default_rng(0)
    row, eps = rng.normal(size=5), float(jnp.finfo(dtype).eps)
    last_bits = 1 + eps * rng.integers(-1, 2, (100, 5))
    far = 1e4 if dtype == jnp.float32 else 1e12
    cloud = rng.normal(size=(100, 5)) * [3, 1, 1, 1, 1]
    flat = {
        "constant": np.full((100, 5), 0.1),
        "far": np.full((100, 5), far + 0.1),
        "collapsed": row * last_bits,
        "collapsed and far": far + row * last_bits,
        "one": row[None],
    }
    real = {"cloud": cloud, "moved": cloud + far, "small": 1e-12 * cloud}
    return [{n: jnp.asarray(p, dtype) for n, p in c.items()} for c in (flat, real)]


@jax.jit
def axes_of(points):
    """All that is asked of the extent of points."""
    variance = diagnostics.manifold(points).variance
    return {
        "differ": diagnostics.differ(points),
        "centred": diagnostics.centred(points),
        "variance": variance,
        "explained": diagnostics.explained(variance).valid,
        "ratio": diagnostics.participation_ratio(variance),
        "dimension": diagnostics.dimension(variance, 0.9),
        "dimension of all": diagnostics.dimension(variance, 1.0),
        "share": {axes: diagnostics.leading_share(points, axes) for axes in (1, 2, 5)},
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_points_without_extent_have_no_axes(dtype):
    flat, real = clouds(dtype)
    for points in flat.values():
        found = axes_of(points)
        assert not found["differ"]
        assert (found["centred"] == 0).all()
        assert found["share"][2] == diagnostics.Measurement(0, False)
        assert not found["explained"].any()
        assert found["ratio"] == 0
        assert found["dimension"] == 0
    found = [axes_of(points) for points in real.values()]
    shares = [each["share"][2] for each in found]
    assert all(share.valid for share in shares)
    # Moved or scaled they are the same points, but for the rounding of the move.
    values = [float(share.value) for share in shares]
    np.testing.assert_allclose(values, values[0], rtol=1e-3)
    assert [each["dimension"] for each in found] == [4] * 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_line_far_away_is_a_line(dtype):
    """And no share is above 1 by rounding."""
    along = np.random.default_rng(0).normal(size=(100, 1))
    line = along * np.array([1, 2, 3, 4, 5.0]) + (1e4 if dtype == jnp.float32 else 1e12)
    found = axes_of(jnp.asarray(line, dtype))
    assert (found["variance"][1:] == 0).all()
    assert found["dimension of all"] == 1
    assert found["ratio"] == pytest.approx(1)
    for share in found["share"].values():
        assert share.valid
        assert 0.9999 < share.value <= 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_shares_and_cosines_are_never_above_one(dtype):
    rng = np.random.default_rng(0)
    for seed in range(20):
        row = jnp.asarray(rng.normal(size=(1, 5)), dtype)
        same = jnp.repeat(row, 7, axis=0)
        equal = jnp.full((7, 7), 1 / 7, dtype)
        numbers = [
            compiled.orthogonality(same).absolute.value,
            compiled.query_key_alignment(equal, same, same).value.max(),
            compiled.specialisation(equal, same).value.max(),
            compiled.usage_entropy(jnp.full(7, 0.1 + seed, dtype)).value,
            compiled.relative_entropy(equal).value.max(),
        ]
        assert all(0.9 < number <= 1 for number in numbers)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_sources_that_serve_alike_but_for_rounding_have_no_gate(dtype):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.dirichlet(np.ones(100), size=8), dtype)
    upstream = jnp.asarray(rng.normal(size=(8, 5)), dtype)
    flat, real = clouds(dtype)
    for name in ("constant", "collapsed"):
        b = laws.compatibility(upstream, flat[name])
        assert not compiled.gate(weight, b).valid.any()
        assert (compiled.advantage_spread(b) == 0).all()
    for points in real.values():
        b = laws.compatibility(upstream, points)
        assert compiled.gate(weight, b).valid.all()


def test_what_is_not_finite_is_not_hidden():
    lost = jnp.ones((5, 3)).at[2, 1].set(jnp.nan)
    assert compiled.differ(lost)
    assert np.isnan(compiled.centred(lost)).any()
    assert np.isnan(compiled.drift(lost, lost)).any()
    assert compiled.differ(jnp.ones((5, 3)).at[2, 1].set(jnp.inf))


def test_what_is_masked_is_never_read(x64):
    worth, mask = np.array([[1.0, 2.0, np.nan]]), np.array([[True, True, False]])
    weight = np.array([[0.5, 0.5, 0.0]])
    assert compiled.advantage_spread(worth, mask) == 0.5
    np.testing.assert_array_equal(compiled.gate(weight, worth, mask), [[1], [True]])
    advantage = laws.advantage(weight, worth)
    assert compiled.routing_pressure(weight, advantage) == 0.25
