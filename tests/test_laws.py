"""The laws all at once, and what is not a derivative; the rest: test_witnesses.py."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    central_difference,
    random_direction,
    random_mask,
    random_problem,
    relative_error,
)

from jaxattn.algorithms import schedules
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses, m_steps

QUERIES, SOURCES, D_K, D_V = 250, 170, 9, 14


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# Law -> the shapes that it is given.
MAP, QUERY, KEY = (QUERIES, SOURCES), (QUERIES, D_K), (SOURCES, D_K)
UPSTREAM, VALUE = (QUERIES, D_V), (SOURCES, D_V)
SHAPES = {
    laws.logit_gradient: ((QUERIES, 6), "targets"),
    laws.upstream_gradient: ((QUERIES, 6), (D_V, 6)),
    laws.compatibility: (UPSTREAM, VALUE),
    laws.expected_compatibility: (UPSTREAM, UPSTREAM),
    laws.advantage: (MAP, MAP),
    laws.score_gradient: (MAP, MAP),
    laws.value_gradient: (MAP, UPSTREAM),
    laws.query_gradient: (MAP, KEY),
    laws.key_gradient: (MAP, QUERY),
    laws.projection_gradient: (QUERY, UPSTREAM),
    laws.output_bias_gradient: (UPSTREAM,),
    laws.column_usage: (MAP,),
    laws.prototype_signal: (MAP, UPSTREAM),
    laws.overlap_kernel: (MAP,),
    laws.score_motion: (MAP, MAP, ()),
    laws.weight_motion: (MAP, MAP),
    laws.value_motion: (MAP, UPSTREAM, ()),
    laws.compatibility_motion: (UPSTREAM, VALUE),
    laws.routing_motion: (MAP, VALUE),
    laws.content_motion: (MAP, VALUE),
    laws.context_motion: (MAP, MAP, VALUE, VALUE),
    laws.loss_change: (MAP, MAP),
    laws.descent_loss_change: (MAP, ()),
    laws.remainder: ((), MAP, MAP),
    laws.residual_gradient: (UPSTREAM, UPSTREAM),
}


@pytest.mark.parametrize("law", SHAPES, ids=lambda law: law.__name__)
def test_no_law_materialises_more_than_it_returns(law):
    arguments = [
        array(QUERIES, dtype=jnp.int32) if shape == "targets" else array(*shape)
        for shape in SHAPES[law]
    ]
    assert_lean(law, arguments)


def assert_lean(law, arguments, times=1):
    memory = jax.jit(law).lower(*arguments).compile().memory_analysis()
    # Sums of a row or a column, which XLA may take in 8 parts; a map is ten times that.
    small = 8 * 4 * (QUERIES + SOURCES) + 1024
    assert memory.temp_size_in_bytes <= times * memory.output_size_in_bytes + small


def public_laws():
    found = inspect.getmembers(laws, inspect.isfunction)
    return {name: law for name, law in found if name[0] != "_"}


def test_every_law_says_what_it_is_and_whence():
    for name, law in public_laws().items():
        for part in (" = ", "Args:", "Returns:", "Source:"):
            assert part in law.__doc__, (name, part)


def test_no_law_is_left_out_of_this():
    public = public_laws().keys()
    variants = {"drop", "score_bias_gradient", "layer_norm_gradient", "group_gradient"}
    others = {"input_gradient", "loss_and_gradient"}
    assert public == {law.__name__ for law in SHAPES} | variants | others


def test_the_input_gradient_holds_its_three_paths():
    sizes = {"d_x": 20, "d_k": D_K, "d_v": D_V, "num_classes": 6}
    params = attention.init_params(jax.random.key(0), **sizes)
    paths = (array(*QUERY), array(*QUERY), array(*UPSTREAM))
    assert_lean(functools.partial(laws.input_gradient, params), paths, times=2)


@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (7, 1), (1, 1)])
def test_gradient_of_a_shared_bias(x64, shape):
    rng = np.random.default_rng(0)
    score, bias = rng.normal(size=(7, 5)), jnp.asarray(rng.normal(size=shape))
    cotangent = rng.normal(size=(7, 5))
    mask = random_mask(0, 7)[:, :5]

    def loss(added):
        return jnp.sum(cotangent * attention.weights(score + added, mask))

    by_score = jax.grad(loss)(jnp.broadcast_to(bias, (7, 5)))
    np.testing.assert_allclose(
        laws.score_bias_gradient(by_score, shape), jax.grad(loss)(bias), atol=1e-14
    )


def test_variants_materialise_no_more_than_they_return():
    keep = array(*MAP, dtype=bool)
    calls = {
        lambda a, keep: laws.drop(a, keep, 0.1): (array(*MAP), keep),
        lambda s: laws.score_bias_gradient(s, (1, SOURCES)): (array(*MAP),),
        lambda v, g: laws.layer_norm_gradient(v, g, 1e-5): (array(*VALUE),) * 2,
        lambda g: laws.group_gradient(g, 2): (array(SOURCES, 8, D_K),),
    }
    for law, arguments in calls.items():
        assert_lean(law, arguments)


def test_looking_more_at_an_advantageous_source_lowers_the_loss(x64):
    params, inputs, targets = random_problem(0)
    f = attention.forward(params, inputs)
    upstream = laws.upstream_gradient(laws.logit_gradient(f.logit, targets), params.w_o)
    advantage = laws.advantage(f.weight, laws.compatibility(upstream, f.value))

    def loss(score):
        context = attention.weights(score) @ f.value
        return losses.cross_entropy(attention.read_out(params, context), targets)

    where = np.unravel_index(np.argmax(f.weight * advantage), f.weight.shape)
    assert advantage[where] > 0
    assert loss(f.score.at[where].add(1e-3)) < loss(f.score)


def test_prototype_signal_is_a_weighted_mean(x64):
    rng = np.random.default_rng(0)
    weight, upstream = rng.random((7, 5)), rng.normal(size=(7, 3))
    weight[:, 2] = 0  # a source that nobody uses
    prototype = laws.prototype_signal(jnp.asarray(weight), jnp.asarray(upstream))
    np.testing.assert_array_equal(prototype[2], 0)
    mean = np.average(upstream, axis=0, weights=weight[:, 1])
    np.testing.assert_allclose(prototype[1], mean, atol=1e-15)


@pytest.mark.parametrize("rate", [1.0, -0.1, 2])
def test_a_wrong_dropout_rate_is_named(rate):
    with pytest.raises(ValueError, match=r"dropout_rate=.*allowed: 0 <= rate < 1"):
        laws.drop(jnp.ones((2, 2)), jnp.ones((2, 2), bool), rate)


def test_a_wrong_bias_shape_is_named():
    with pytest.raises(
        ValueError, match=r"shape=\(1, 4\): allowed: 1 or 3 where it says 4"
    ):
        laws.score_bias_gradient(jnp.ones((2, 3)), (1, 4))
    for shape in ((2, 3), (1, 3), (2, 1), (1, 1)):
        found = laws.score_bias_gradient(jnp.ones((2, 3)), shape)
        chex.assert_shape(found, shape)
        assert found.sum() == 6


def test_a_step_of_descent_changes_the_loss_as_promised():
    gradient = {"w": jnp.array([[3.0, 4.0]]), "b": jnp.array([1.0])}
    assert laws.descent_loss_change(gradient, 0.1) == pytest.approx(-2.6)
    motion = {"w": jnp.array([[1.0, 0.0]]), "b": jnp.array([-2.0])}
    assert laws.loss_change(gradient, motion) == pytest.approx(1.0)


def dense_loss(params, inputs, targets, mask, weights):
    logit = attention.forward(params, inputs, mask).logit
    return losses.cross_entropy(logit, targets, weights)


def masks(length):
    return {
        "none": None,
        "causal": attention.causal_mask(length),
        "random": random_mask(0, length),
        "blind": np.zeros((length, length), bool),
    }


@pytest.mark.parametrize(
    ("length", "kind"),
    [(length, kind) for length in (1, 13, 257, 700) for kind in masks(1)]
    + [pytest.param(2100, "causal", marks=pytest.mark.slow)],
)
def test_loss_and_gradient_equals_autodiff(x64, length, kind):
    mask = masks(length)[kind]
    weights = jnp.asarray(np.random.default_rng(0).random(length)).at[0].set(0)
    weights = weights + float(length == 1)
    # More classes than values, and fewer: the two spaces b can be computed in.
    for num_classes, bias, weight in ((6, True, weights), (2, False, None)):
        params, inputs, targets = random_problem(
            length, length=length, num_classes=num_classes, bias=bias
        )
        by_hand = jax.jit(
            lambda p, x, y, m=mask, w=weight: laws.loss_and_gradient(p, x, y, m, w)
        )(params, inputs, targets)
        loss, gradient = jax.jit(jax.value_and_grad(dense_loss))(
            params, inputs, targets, mask, weight
        )
        assert by_hand[0] == pytest.approx(float(loss), rel=1e-13)
        chex.assert_trees_all_equal_shapes_and_dtypes(by_hand[1], gradient)
        for name in params._fields[: 5 if bias else 4]:
            np.testing.assert_allclose(
                getattr(by_hand[1], name),
                getattr(gradient, name),
                rtol=1e-11,
                atol=1e-12 * float(jnp.abs(gradient.w_o).max()) + 1e-15,
            )


def test_loss_and_gradient_along_a_direction(x64):
    params, inputs, targets = random_problem(0, length=300)
    mask = attention.causal_mask(300)
    _, gradient = laws.loss_and_gradient(params, inputs, targets, mask)
    direction = random_direction(0, params)
    slope = central_difference(
        lambda p: dense_loss(p, inputs, targets, mask, None), params, direction
    )
    by_hand = sum(np.vdot(g, d) for g, d in zip(gradient, direction, strict=True))
    assert by_hand == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_loss_and_gradient_in_float32(scale):
    """Scores up to 1e5, nearly one-hot rows: still finite, and close to float64."""
    sizes = {"length": 400, "scale": 1.0, "bias": True}
    params, inputs, targets = random_problem(0, **sizes, dtype=np.float32)
    params = params._replace(w_q=params.w_q * scale)
    mask = attention.causal_mask(400)
    single = laws.loss_and_gradient(params, inputs, targets, mask)
    chex.assert_tree_all_finite(single)
    chex.assert_type(jax.tree.leaves(single), jnp.float32)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), params)
        double = laws.loss_and_gradient(
            wide, jnp.asarray(inputs, jnp.float64), targets, mask
        )
    # Scores of size s are known to s * 6e-8, and so are the weights, relatively.
    tolerance = 1e-5 * max(1.0, scale)
    for name in params._fields:
        actual, expected = getattr(single[1], name), getattr(double[1], name)
        assert relative_error(actual, expected) < tolerance, name


def test_float32_stays_float32_under_x64(x64):
    params, inputs, targets = random_problem(0, dtype=np.float32)
    mask = attention.causal_mask(len(inputs))
    chex.assert_type(
        jax.tree.leaves(laws.loss_and_gradient(params, inputs, targets, mask)),
        jnp.float32,
    )
    chex.assert_type(jax.tree.leaves(attention.readout(params, inputs)), jnp.float32)


def test_loss_and_gradient_under_vmap_is_one_by_one(x64):
    problems = [random_problem(seed, length=300) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    mask = attention.causal_mask(300)
    function = functools.partial(laws.loss_and_gradient, mask=mask)
    together = jax.jit(jax.vmap(function))(*stacked)
    for index, problem in enumerate(problems):
        one = jax.tree.map(lambda leaf, n=index: leaf[n], together)
        assert relative_error(one, function(*problem)) < 1e-13


def test_a_traced_causal_mask_is_honoured_too(x64):
    params, inputs, targets = random_problem(0, length=300)
    mask = attention.causal_mask(300)
    traced = jax.jit(laws.loss_and_gradient)(params, inputs, targets, mask)
    known = laws.loss_and_gradient(params, inputs, targets, mask)
    assert relative_error(traced, known) < 1e-13


def test_memory_of_a_long_causal_step():
    """Less than one T x T array, where dense autodiff keeps several."""
    length = 2000
    params, inputs, targets = random_problem(0, length=length, dtype=np.float32)
    batch = Batch(inputs, targets)

    def temporary(gradient):
        step = jax.jit(
            functools.partial(gradient, wiring=schedules.Wiring(causal=True))
        )
        return step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    square = 4 * length**2
    assert temporary(schedules.by_laws) < square / 2
    assert temporary(schedules.by_autodiff) > square


def test_a_planted_fault_in_the_blocks_is_seen(x64, monkeypatch):
    params, inputs, targets = random_problem(0, length=300)
    mask = attention.causal_mask(300)
    autodiff = jax.grad(dense_loss)(params, inputs, targets, mask, None)
    _, right = laws.loss_and_gradient(params, inputs, targets, mask)
    assert relative_error(right, autodiff) < 1e-12
    monkeypatch.setattr(attention, "is_causal", lambda mask: True)
    _, forgotten = laws.loss_and_gradient(params, inputs, targets, random_mask(0, 300))
    autodiff = jax.grad(dense_loss)(params, inputs, targets, random_mask(0, 300), None)
    assert relative_error(forgotten, autodiff) > 1e-3


def routes_of(params, inputs, mask, weights):
    """Every way to a loss and its gradient, as functions of the targets."""
    batch = Batch(inputs, jnp.zeros(len(inputs), int), weights)
    causal = schedules.Wiring(causal=True)

    def plain(targets):
        def loss(params):
            logit = attention.forward(params, inputs, mask).logit
            return losses.cross_entropy(logit, targets, weights)

        return jax.value_and_grad(loss)(params)

    def m_step(targets):
        held, _ = schedules.hold(
            params, batch._replace(targets=targets), schedules.causal_mix
        )
        found = m_steps.signals(params, held)
        return found.loss, found.value_gradient

    routes = {
        "laws": lambda t: laws.loss_and_gradient(params, inputs, t, mask, weights),
        "autodiff": plain,
        "m_step": m_step,
    }
    for name, gradient in schedules.GRADIENTS.items():
        routes[f"schedule {name}"] = functools.partial(
            lambda gradient, t: gradient(
                params, batch._replace(targets=t), wiring=causal
            ),
            gradient,
        )
    return routes


@pytest.mark.parametrize("fault", ["target -1", "target C", "weight -1"])
def test_what_is_wrong_makes_nan_of_loss_and_gradient_on_every_route(fault):
    params, inputs, targets = random_problem(0, dtype=np.float32)
    weights = jnp.ones(12)
    if fault == "weight -1":
        weights = weights.at[3].set(-1.0)
    else:
        targets = targets.at[3].set(-1 if fault == "target -1" else 6)
    mask = attention.causal_mask(12)
    for name, route in routes_of(params, inputs, mask, weights).items():
        for leaf in jax.tree.leaves(route(targets)):
            assert np.isnan(leaf).any(), name


def test_padding_without_weight_is_never_read_on_any_route():
    params, inputs, targets = random_problem(0, dtype=np.float32)
    weights = jnp.asarray(np.arange(12) < 8, jnp.float32)
    mask = attention.causal_mask(12)
    padded = inputs.at[8:].set(jnp.nan), targets.at[8:].set(-1)
    clean = routes_of(params, inputs, mask, weights)
    for name in ("laws", "schedule laws"):
        spoilt = routes_of(params, padded[0], mask, weights)[name](padded[1])
        for one, other in zip(
            *map(jax.tree.leaves, (spoilt, clean[name](targets))), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    for name, route in clean.items():  # targets alone, on all of them
        results = route(padded[1]), route(targets)
        for one, other in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def test_weights_of_one_are_none_also_with_padding():
    params, inputs, targets = random_problem(0, dtype=np.float32)
    mask = np.tri(12, dtype=bool)
    mask[8:] = False
    padded = inputs.at[8:].set(jnp.nan)
    found = [
        laws.loss_and_gradient(params, padded, targets, mask, weights)
        for weights in (None, jnp.ones(12))
    ]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("causal", [True, False])
def test_laws_do_not_read_what_has_no_weight(x64, causal):
    """Each by itself, of maps in which some sources and some queries have none."""
    rng = np.random.default_rng(0)
    mask = np.tri(9, 7, dtype=bool) if causal else rng.random((9, 7)) < 0.7
    mask[:, 5:], mask[6:] = False, False
    score, upstream, value, query, key = (
        rng.normal(size=shape) for shape in ((9, 7), (9, 3), (7, 3), (9, 2), (7, 2))
    )

    def all_laws(upstream, value, query, key):
        weight = attention.weights(score, mask)
        worth = laws.compatibility(upstream, value)
        of_score = laws.score_gradient(weight, laws.advantage(weight, worth))
        moved = laws.weight_motion(weight, laws.compatibility(query, key))
        return (
            of_score,
            laws.value_gradient(weight, upstream),
            laws.query_gradient(of_score, key),
            laws.key_gradient(of_score, query),
            laws.prototype_signal(weight, upstream),
            moved,
            laws.routing_motion(moved, value),
            laws.content_motion(weight, value),
        )

    wanted = all_laws(upstream, value, query, key)
    upstream[6:], query[6:], value[5:], key[5:] = (np.nan,) * 4
    for one, other in zip(all_laws(upstream, value, query, key), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
