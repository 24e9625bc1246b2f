"""Laws one by one, as far as they are not derivatives; the rest: test_witnesses.py."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_mask, random_problem

from jaxattn.theory import attention, laws, losses

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


def test_every_law_has_its_equation_and_source():
    for name, law in public_laws().items():
        for part in (" = ", "Args:", "Returns:", "Source:"):
            assert part in law.__doc__, (name, part)


def test_no_law_is_left_out_here():
    public = public_laws().keys()
    variants = {"drop", "score_bias_gradient", "layer_norm_gradient", "group_gradient"}
    others = {"input_gradient", "loss_and_gradient"}
    assert public == {law.__name__ for law in SHAPES} | variants | others


def test_the_input_gradient_holds_its_three_paths():
    params, *_ = random_problem(0, d_x=20, d_k=D_K, d_v=D_V, dtype=np.float32)
    paths = (array(*QUERY), array(*QUERY), array(*UPSTREAM))
    assert_lean(functools.partial(laws.input_gradient, params), paths, times=2)


@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (7, 1), (1, 1)])
def test_gradient_of_a_shared_bias(x64, shape):
    rng = np.random.default_rng(0)
    score, bias = rng.normal(size=(7, 5)), jnp.asarray(rng.normal(size=shape))
    cotangent = rng.normal(size=(7, 5))
    mask = random_mask(0, 7)[:, :5]

    @jax.jit
    @jax.grad
    def slope(added):
        return jnp.sum(cotangent * attention.weights(score + added, mask))

    by_score = slope(jnp.broadcast_to(bias, (7, 5)))
    found = laws.score_bias_gradient(by_score, shape)
    np.testing.assert_allclose(found, slope(bias), atol=1e-14)


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


def test_more_weight_on_an_advantageous_source_lowers_the_loss(x64):
    params, inputs, targets = random_problem(0)

    @jax.jit
    def advantages(params, inputs):
        f = attention.forward(params, inputs)
        delta = laws.logit_gradient(f.logit, targets)
        upstream = laws.upstream_gradient(delta, params.w_o)
        return f, laws.advantage(f.weight, laws.compatibility(upstream, f.value))

    f, advantage = advantages(params, inputs)

    @jax.jit
    def loss(score):
        context = attention.weights(score) @ f.value
        return losses.cross_entropy(attention.read_out(params, context), targets)

    gain = np.asarray(f.weight) * np.asarray(advantage)
    where = np.unravel_index(np.argmax(gain), gain.shape)
    assert gain[where] > 0
    more = np.array(f.score)
    more[where] += 1e-3
    assert loss(more) < loss(f.score)


def test_prototype_signal_is_a_weighted_mean(x64):
    rng = np.random.default_rng(0)
    weight, upstream = rng.random((7, 5)), rng.normal(size=(7, 3))
    weight[:, 2] = 0  # an unused source
    prototype = laws.prototype_signal(jnp.asarray(weight), jnp.asarray(upstream))
    np.testing.assert_array_equal(prototype[2], 0)
    mean = np.average(upstream, axis=0, weights=weight[:, 1])
    np.testing.assert_allclose(prototype[1], mean, atol=1e-15)


@pytest.mark.parametrize("rate", [1.0, -0.1, 2])
def test_a_wrong_dropout_rate_is_named(rate):
    with pytest.raises(ValueError, match=r"dropout_rate=.*: must be from 0, below 1"):
        laws.drop(np.ones((2, 2)), np.ones((2, 2), bool), rate)


def test_a_wrong_bias_shape_is_named():
    with pytest.raises(
        ValueError, match=r"shape=\(1, 4\): must be 1 or 3 in place of 4"
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


@pytest.mark.parametrize("causal", [True, False])
def test_laws_do_not_read_what_has_no_weight(x64, causal):
    """Each by itself, of maps in which some sources and some queries have none."""
    rng = np.random.default_rng(0)
    mask = np.tri(9, 7, dtype=bool) if causal else rng.random((9, 7)) < 0.7
    mask[:, 5:], mask[6:] = False, False
    score, upstream, value, query, key = (
        rng.normal(size=shape) for shape in ((9, 7), (9, 3), (7, 3), (9, 2), (7, 2))
    )
    run = functools.partial(all_laws, score, mask)
    wanted = run(upstream, value, query, key)
    upstream, value, query, key = map(np.copy, (upstream, value, query, key))
    upstream[6:], query[6:], value[5:], key[5:] = (np.nan,) * 4
    for one, other in zip(run(upstream, value, query, key), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@jax.jit
def all_laws(score, mask, upstream, value, query, key):
    weight = attention.weights(score, mask)
    compatibility = laws.compatibility(upstream, value)
    of_score = laws.score_gradient(weight, laws.advantage(weight, compatibility))
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
