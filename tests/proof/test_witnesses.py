"""The checker: right laws pass it, and every wrong one is named."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.proof import check, claims, errors, reference
from jaxattn.theory import attention, laws, row_blocks

BOUNDS = check.Bounds(float64=1e-12, float32=1e-5, difference=1e-6)
# Room for every law: several sources, values with a direction, 2 groups of 2 heads.
SHAPE = reference.Shape(7, 6, 5, 4, 3, 4, 4, 2)


@pytest.fixture(scope="module")
def gathered():
    problems = [
        reference.draw_problem(np.random.default_rng([7, seed]), SHAPE, kind)
        for seed, kind in enumerate(reference.KINDS)
    ]
    return check.gather(problems)


def broken(gathered, precision="float64", transformation="vmap"):
    """Law -> witnesses that it broke the bound of."""
    errors = check.measure(gathered, precision, transformation)
    limit = {
        "autodiff": getattr(BOUNDS, precision),
        "difference": max(getattr(BOUNDS, precision), BOUNDS.difference),
    }
    return {
        law: {w for w, e in by_witness.items() if not e.max() <= limit[w]}
        for law, by_witness in errors.items()
        if any(not e.max() <= limit[w] for w, e in by_witness.items())
    }


def only(monkeypatch, *names):
    """Checks these laws alone, where a test would compile all of them anew."""
    monkeypatch.setattr(check, "LAWS", {name: claims.LAWS[name] for name in names})


# Op by op, everything is compiled once more.
_SLOW = {("float64", "bare"), ("float32", "bare"), ("float32", "vmap")}


@pytest.mark.parametrize(
    ("precision", "transformation"),
    [
        pytest.param(*place, marks=[pytest.mark.slow] if place in _SLOW else [])
        for place in itertools.product(check.PRECISIONS, check.TRANSFORMATIONS)
    ],
)
def test_all_laws_hold(gathered, precision, transformation):
    assert broken(gathered, precision, transformation) == {}


def test_every_law_is_weighed(gathered):
    weighed = check.weighed(gathered)
    assert weighed.keys() == claims.LAWS.keys()
    kind = reference.KINDS.index
    for law, tested in weighed.items():
        # By every kind but where there is nothing to say.
        silent = {"no weights", "uniform", "one-hot"}
        for name in set(reference.KINDS) - silent - {"tiny values", "huge values"}:
            assert tested[kind(name)] or law == "scores", (law, name)
        assert tested.sum() >= 5, law
    for law in ("score_gradient", "weight_motion", "key_gradient, heads"):
        assert weighed[law][kind("one-hot")], law  # near ties, not only dead rows


def test_what_terms_leave_when_they_cancel_is_no_test(gathered):
    evidence = gathered.evidence["value_gradient"]
    true, terms = evidence.truth.copy(), np.ones_like(evidence.terms)
    true[:4] = 0
    true[4:] = 0.02
    true[5] = 0.005
    nothing = {"value_gradient": evidence._replace(truth=true, terms=terms)}
    weighed = check.weighed(gathered._replace(evidence=gathered.evidence | nothing))
    np.testing.assert_array_equal(
        weighed["value_gradient"], [False] * 4 + [True, False, True, True]
    )


def public_laws():
    found = inspect.getmembers(laws, inspect.isfunction)
    return [n for n, f in found if f.__module__ == laws.__name__ and n[0] != "_"]


@pytest.mark.parametrize("name", sorted(set(public_laws()) - {"remainder"}))
def test_one_per_cent_is_seen_in_every_law(gathered, monkeypatch, name):
    """Also says that no public law is left out of the checker."""
    law = getattr(laws, name)
    monkeypatch.setattr(
        laws, name, lambda *xs: jax.tree.map(lambda x: 1.01 * x, law(*xs))
    )
    # Its own entries in the table, or those of what it is made for.
    own = {law for law in claims.LAWS if law.partition(",")[0] == name} or {
        "drop": {"value_gradient, dropout"},
        "group_gradient": {"key_gradient, heads", "value_gradient, heads"},
    }[name]
    found = broken(gathered)
    assert found.keys() >= own
    assert all(found[law] == {"autodiff", "difference"} for law in own)


# Fault -> where it is planted, what it is, and every law that must be named for it.
FAULTS = {
    "flipped sign": (
        laws,
        "score_gradient",
        lambda law: lambda weight, advantage: -law(weight, advantage),
        {
            "score_gradient",
            "score_gradient, dropout",
            "score_gradient, heads",
            "score_motion",
        },
    ),
    "no 1/sqrt(d_k) in queries": (
        laws,
        "query_gradient",
        lambda law: lambda score_gradient, key: score_gradient @ key,
        {"query_gradient", "query_gradient, heads"},
    ),
    "no 1/sqrt(d_k) in scores": (
        attention,
        "scores",
        lambda law: lambda query, key, bias: query @ key.T + bias,
        {"scores"},
    ),
    "no centring": (
        laws,
        "advantage",
        lambda law: lambda weight, compatibility: -compatibility,
        {"advantage", "score_gradient, dropout", "score_gradient, heads"},
    ),
    "centred on the plain mean": (
        laws,
        "weight_motion",
        lambda law: lambda a, ds: a * (ds - ds.mean(axis=1, keepdims=True)),
        {"weight_motion"},
    ),
    "forgotten mask": (
        attention,
        "weights",
        lambda law: lambda score, mask: law(score),
        {"weights"},
    ),
    "forgotten mask in the blocks": (
        row_blocks,
        "over_row_blocks",
        lambda law: lambda function, mask, *rows: law(function, None, *rows),
        {"loss_and_gradient", "loss_and_gradient, causal"},
    ),
    "swapped head groups": (
        laws,
        "group_gradient",
        lambda law: lambda g, n: g.reshape(len(g), -1, n, g.shape[2]).sum(axis=1),
        {"key_gradient, heads", "value_gradient, heads"},
    ),
    "keys of the other group": (
        attention,
        "repeat_heads",
        lambda law: lambda x, n: jnp.tile(x, (1, n // x.shape[1], 1)),
        {"query_gradient, heads", "score_gradient, heads"},
    ),
    "dropout not scaled up": (
        laws,
        "drop",
        lambda law: lambda array, keep, rate: jnp.where(keep, array, 0),
        {"score_gradient, dropout", "value_gradient, dropout"},
    ),
    "transposed": (
        laws,
        "column_usage",
        lambda law: lambda weight: law(weight.T)[: weight.shape[1]],
        {"column_usage", "prototype_signal"},
    ),
    "one of two heads lost": (
        attention,
        "split_heads",
        lambda law: lambda x, n: law(x, n).at[:, 0].set(law(x, n)[:, 1]),
        {"score_gradient, heads"},
    ),
    "a result of another shape": (
        laws,
        "expected_compatibility",
        lambda law: lambda u, g: law(u, g)[:, None],
        {"expected_compatibility"},
    ),
    "a constant": (
        laws,
        "layer_norm_gradient",
        lambda law: lambda *xs: law(*xs) + 1e-3,
        {"layer_norm_gradient"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_alone(gathered, monkeypatch, fault):
    where, name, plant, named = FAULTS[fault]
    monkeypatch.setattr(where, name, plant(getattr(where, name)))
    found = broken(gathered)
    assert found == {law: {"autodiff", "difference"} for law in named}


def test_a_fault_under_jit_alone_is_seen(gathered, monkeypatch):
    right = laws.column_usage

    def wrong(weight):
        return right(weight) * (1.01 if isinstance(weight, jax.core.Tracer) else 1)

    monkeypatch.setattr(laws, "column_usage", wrong)
    only(monkeypatch, "column_usage", "value_gradient")
    assert broken(gathered, transformation="bare") == {}
    assert broken(gathered, transformation="jit").keys() == {"column_usage"}


@pytest.mark.parametrize("precision", check.PRECISIONS)
def test_no_kind_of_problem_excuses_a_flipped_sign(gathered, monkeypatch, precision):
    """Each alone: scores of 1e4 or values of 1e6 must not make a bound too wide."""
    at_once = "loss_and_gradient", "loss_and_gradient, causal"
    only(monkeypatch, "score_gradient", "weight_motion", *at_once)
    for name in ("score_gradient", "weight_motion", "loss_and_gradient"):
        right = getattr(laws, name)
        monkeypatch.setattr(
            laws, name, lambda *xs, f=right: jax.tree.map(jnp.negative, f(*xs))
        )
    errors = check.measure(gathered, precision, "both")
    bound = getattr(BOUNDS, precision)
    for kind in ("ordinary", "one-hot", "tiny values", "huge values"):
        number = reference.KINDS.index(kind)
        for law in ("score_gradient", "weight_motion"):
            assert errors[law]["autodiff"][number] > 1, (law, kind)
        for law in at_once:
            assert errors[law]["autodiff"][number] > 10 * bound, (law, kind)


def test_a_law_that_changes_the_precision_is_broken(gathered, monkeypatch):
    right = laws.query_gradient
    monkeypatch.setattr(
        laws, "query_gradient", lambda s, k: right(s, k).astype(jnp.float64)
    )
    wrong = {"query_gradient", "query_gradient, heads"}
    only(monkeypatch, *wrong, "key_gradient", "key_gradient, heads")
    assert broken(gathered, "float32", "jit").keys() == wrong
    assert broken(gathered, "float64", "jit") == {}


def test_a_nan_is_a_broken_law(gathered, monkeypatch):
    right = laws.value_gradient
    monkeypatch.setattr(
        laws, "value_gradient", lambda a, u: right(a, u).at[0, 0].set(jnp.nan)
    )
    assert "value_gradient" in broken(gathered)


def test_broken_says_where():
    errors = {"autodiff": np.array([0.0, np.inf, 1e-3]), "difference": np.zeros(3)}
    found = check.Check(
        errors={"some_law": {"float64": {"jit": errors}}},
        weighed={"some_law": np.ones(3, bool)},
        shapes=(SHAPE,) * 3,
        kinds=reference.KINDS[:3],
    )
    (fault,) = check.broken(found, BOUNDS)
    assert fault.seed == 1
    assert fault.kind == "masked rows"
    assert (fault.error, fault.bound) == (np.inf, 1e-12)
    assert check.broken(found, check.Bounds(np.inf, 1, 1)) == []


def test_shapes_have_room_and_ones():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        roomy, ones, *others = check.deal_shapes(rng, 8, 16, 8)
        assert min(roomy[:5]) >= 3
        assert 2 <= roomy.num_classes < roomy.d_v
        assert roomy.num_heads >= 2 * roomy.num_kv_heads >= 4
        assert ones == (1, 1, 1, 1, 1, 2, 1, 1)
        for shape in others:
            assert max(shape.queries, shape.sources) <= 16
            assert shape.num_heads % shape.num_kv_heads == 0
            assert shape.num_classes >= 2


def test_all_kinds_meet_all_shapes():
    for shapes in (1, 2, 3, 5, 8, 9):
        dealt, kinds = check.deal(8 * shapes, shapes)
        assert len(set(zip(dealt.tolist(), kinds, strict=True))) == 8 * shapes
    some = [SHAPE] * 9
    assert check.passes(10, some) == 2 * 9
    assert check.passes(80, some) == 9 * 9


@jax.jit
@jax.vmap
def plain(problem):
    outcome, _ = reference.forward(problem, "plain", {})
    return jnp.max(jnp.abs(outcome.score)), outcome.loss


@pytest.mark.parametrize("kind", reference.KINDS)
def test_problems_are_what_they_are_called(x64, kind):
    drawn = [
        reference.draw_problem(np.random.default_rng(seed), SHAPE, kind)
        for seed in range(20)
    ]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
    scores, loss = map(np.asarray, plain(stacked))
    assert np.isfinite(loss).all()
    if kind == "one-hot":
        assert 1e3 < np.median(scores) < 1e5
        assert scores.max() > 1e4
    elif kind == "uniform":
        assert scores.max() == 0
    elif kind == "masked rows":
        assert np.mean([(~p.mask.any(axis=1)).mean() for p in drawn]) > 0.3
    elif kind == "no weights":
        assert all((p.weights == 0).all() for p in drawn)
    elif kind == "zero weights":
        assert np.mean([(p.weights == 0).mean() for p in drawn]) > 0.3
    elif kind.endswith("values"):
        size = np.median([np.abs(p.params.w_v).mean() for p in drawn])
        assert size == pytest.approx({"t": 1e-6, "h": 1e6}[kind[0]], rel=0.5)


def test_the_second_implementation_agrees_with_the_first(x64, gathered):
    number = reference.KINDS.index("masked rows")
    case = jax.tree.map(lambda leaf: leaf[number], gathered.cases)
    problem = case.problem
    forward = jax.jit(attention.forward)
    for stages, mask in (
        (case.own.at, problem.own_mask),
        (case.causal.at, attention.causal_mask(7)),
    ):
        first = forward(problem.params, problem.inputs, mask)
        for name in ("query", "key", "value", "score", "weight", "context", "logit"):
            np.testing.assert_allclose(
                getattr(first, name), getattr(stages, name), rtol=1e-12, atol=1e-13
            )
    stages = case.norm.at
    normed = attention.layer_norm(stages.raw_value, reference.EPSILON)
    np.testing.assert_allclose(normed, stages.value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (np.sin, 1.0),
        (lambda t: np.exp(3 * t) + 1e3, 3.0),
        (lambda t: 2 + 1e-9 * t, 1e-9),
        (lambda t: np.tanh(1e5 * t), 1e5),  # only the smallest steps see it
        (lambda t: np.maximum(t - 1e-4, 0) + 2 * t, 2.0),  # a kink nearby
    ],
)
def test_slope_by_differences(function, slope):
    steps = errors.STEPS
    along = np.stack([function(steps), function(-steps)])[None]
    assert errors.extrapolated_slope(along)[0] == pytest.approx(slope, rel=1e-5)
