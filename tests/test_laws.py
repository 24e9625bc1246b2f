"""Every law by three witnesses: by hand, by autodiff, by central difference."""

import functools

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

from jaxattn import attention, laws, losses, schedules
from jaxattn.tasks.base import Batch

VARIANTS = {
    "bare": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: (
        lambda *xs: jax.tree.map(
            lambda r: r[0], jax.vmap(f)(*jax.tree.map(lambda x: x[None], xs))
        )
    ),
}
VARIANTS["jit vmap"] = lambda f: jax.jit(VARIANTS["vmap"](f))

QUERIES, SOURCES, D_K, D_V, CLASSES = 7, 5, 4, 3, 6


class Case:
    """One head's pieces, T and S apart; the loss as a function of each of them."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape))

        self.query, self.key = draw(QUERIES, D_K), draw(SOURCES, D_K)
        self.value, self.w_o = draw(SOURCES, D_V), draw(D_V, CLASSES)
        self.position = jnp.asarray(rng.random(QUERIES) * (rng.random(QUERIES) < 0.8))
        self.target = jnp.asarray(rng.integers(0, CLASSES, QUERIES))
        mask = rng.random((QUERIES, SOURCES)) < 0.7
        mask[2] = False  # a query that may look nowhere
        mask[:, 0] = False  # a source that nobody may use
        self.mask = jnp.asarray(mask)

        self.score = self.query @ self.key.T / D_K**0.5
        self.weight = jax.nn.softmax(self.score, where=self.mask)
        self.context = self.weight @ self.value
        self.logit = self.context @ self.w_o
        self.delta = laws.logit_gradient(self.logit, self.target, self.position)
        self.upstream = laws.upstream_gradient(self.delta, self.w_o)
        self.compatibility = laws.compatibility(self.upstream, self.value)
        self.advantage = laws.advantage(self.weight, self.compatibility)
        self.score_gradient = laws.score_gradient(self.weight, self.advantage)

    def loss_of_logit(self, logit):
        return losses.cross_entropy(logit, self.target, self.position)

    def loss_of_context(self, context):
        return self.loss_of_logit(context @ self.w_o)

    def loss_of_weight(self, weight):
        return self.loss_of_context(weight @ self.value)

    def loss_of_score(self, score):
        return self.loss_of_weight(jax.nn.softmax(score, where=self.mask))

    def loss_of_value(self, value):
        return self.loss_of_context(self.weight @ value)

    def loss_of_query(self, query):
        return self.loss_of_score(query @ self.key.T / D_K**0.5)

    def loss_of_key(self, key):
        return self.loss_of_score(self.query @ key.T / D_K**0.5)


# Law -> (its arguments, the loss it is the gradient of, and for what).
LAWS = {
    laws.logit_gradient: (("logit", "target", "position"), "loss_of_logit", "logit"),
    laws.upstream_gradient: (("delta", "w_o"), "loss_of_context", "context"),
    laws.compatibility: (("upstream", "value"), "loss_of_weight", "weight"),
    laws.score_gradient: (("weight", "advantage"), "loss_of_score", "score"),
    laws.value_gradient: (("weight", "upstream"), "loss_of_value", "value"),
    laws.query_gradient: (("score_gradient", "key"), "loss_of_query", "query"),
    laws.key_gradient: (("score_gradient", "query"), "loss_of_key", "key"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_is_the_gradient(x64, law, variant):
    arguments, loss, of = LAWS[law]
    for seed in range(5):
        case = Case(seed)
        point, loss_of = getattr(case, of), getattr(case, loss)
        by_hand = VARIANTS[variant](law)(*(getattr(case, name) for name in arguments))
        chex.assert_shape(by_hand, point.shape)
        assert relative_error(by_hand, jax.grad(loss_of)(point)) < 1e-12
        direction = random_direction(seed, point)
        slope = central_difference(loss_of, point, direction)
        assert np.vdot(by_hand, direction) == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_score_gradient_rows_sum_to_zero(x64):
    for seed in range(50):
        case = Case(seed)
        rows = case.score_gradient.sum(axis=1)
        np.testing.assert_allclose(rows, 0, atol=1e-15)
        weighted = (case.weight * case.advantage).sum(axis=1)
        np.testing.assert_allclose(weighted, 0, atol=1e-15)
        np.testing.assert_allclose(case.delta.sum(axis=1), 0, atol=1e-15)


def test_looking_more_at_an_advantageous_source_lowers_the_loss(x64):
    case = Case(0)
    where = np.unravel_index(
        np.argmax(case.weight * case.advantage), (QUERIES, SOURCES)
    )
    assert case.advantage[where] > 0
    more = case.score.at[where].add(1e-3)
    assert case.loss_of_score(more) < case.loss_of_score(case.score)


def test_responsibilities(x64):
    case = Case(0)
    usage = laws.column_usage(case.weight)
    seeing = case.mask.any(axis=1).sum()
    assert usage.sum() == pytest.approx(float(seeing))
    assert usage[0] == 0
    prototype = laws.prototype_signal(case.weight, case.upstream)
    np.testing.assert_array_equal(prototype[0], 0)
    np.testing.assert_allclose(
        usage[:, None] * prototype,
        laws.value_gradient(case.weight, case.upstream),
        atol=1e-15,
    )
    column = np.asarray(case.weight[:, 1])
    mean = np.average(case.upstream, axis=0, weights=column)
    np.testing.assert_allclose(prototype[1], mean, atol=1e-15)


def test_overlap_kernel(x64):
    for seed in range(20):
        weight = Case(seed).weight
        kernel = laws.overlap_kernel(weight)
        assert np.linalg.eigvalsh(kernel).min() > -1e-14
        usage = laws.column_usage(weight)
        np.testing.assert_allclose(kernel.sum(axis=1), weight @ usage, atol=1e-14)


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
    + [(2100, "causal")],
)
def test_loss_and_gradient_equals_autodiff(x64, length, kind):
    mask = masks(length)[kind]
    # More classes than values, and fewer: the two spaces b can be computed in.
    for num_classes, bias in ((6, True), (2, False)):
        params, inputs, targets = random_problem(
            length, length=length, num_classes=num_classes, bias=bias
        )
        weights = jnp.asarray(np.random.default_rng(0).random(length)).at[0].set(0)
        for weight in (None, weights + float(length == 1)):
            by_hand = jax.jit(
                lambda p, x, y, m=mask, w=weight: laws.loss_and_gradient(p, x, y, m, w)
            )(params, inputs, targets)
            loss, gradient = jax.value_and_grad(dense_loss)(
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
        step = jax.jit(functools.partial(gradient, causal=True))
        return step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    square = 4 * length**2
    assert temporary(schedules.by_laws) < square / 2
    assert temporary(schedules.by_autodiff) > square


@pytest.mark.parametrize(
    ("law", "fault"),
    {
        "sign": ("score_gradient", lambda f: lambda *xs: -f(*xs)),
        "one per cent": ("value_gradient", lambda f: lambda *xs: 1.01 * f(*xs)),
        "no centring": ("advantage", lambda f: lambda weight, b: -b),
        "no 1/sqrt(d_k)": ("key_gradient", lambda f: lambda s, q: s.T @ q),
    }.values(),
    ids=["sign", "one per cent", "no centring", "no scale"],
)
def test_a_planted_fault_is_seen(x64, monkeypatch, law, fault):
    """The witnesses above can tell: each faulty law breaks the bound of its test."""
    monkeypatch.setattr(laws, law, fault(getattr(laws, law)))
    case = Case(0)
    errors = [
        relative_error(
            getattr(laws, right.__name__)(*(getattr(case, n) for n in arguments)),
            jax.grad(getattr(case, loss))(getattr(case, of)),
        )
        for right, (arguments, loss, of) in LAWS.items()
    ]
    assert max(errors) > 1e-3


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
