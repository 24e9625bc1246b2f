"""The checker: right laws pass it, and every wrong one is named."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import attention, laws
from jaxattn.witnesses import check, claims, reference

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


@pytest.mark.parametrize("transformation", check.TRANSFORMATIONS)
@pytest.mark.parametrize("precision", check.PRECISIONS)
def test_all_laws_hold(gathered, precision, transformation):
    assert broken(gathered, precision, transformation) == {}


def test_every_law_is_weighed(gathered):
    counts = check.weighed(gathered)
    assert counts.keys() == claims.LAWS.keys()
    assert min(counts.values()) >= 4


def test_a_law_whose_answer_is_always_zero_is_not_weighed(gathered):
    nothing = {
        "value_gradient": gathered.evidence["value_gradient"]._replace(
            truth=np.zeros((8, 6, 3))
        )
    }
    counts = check.weighed(gathered._replace(evidence=gathered.evidence | nothing))
    assert counts["value_gradient"] == 0
    assert counts["key_gradient"] > 0


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
    found = broken(gathered)
    assert {"autodiff", "difference"} in found.values()
    shown_by = {"drop": "dropout", "group_gradient": "heads"}.get(name, name)
    assert any(shown_by in law for law in found)


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
        attention,
        "over_row_blocks",
        lambda law: lambda function, mask, *rows: law(function, None, *rows),
        {"loss_and_gradient"},
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
        "overlap_kernel",
        lambda law: lambda weight: (weight.T @ weight)[:6, :6].mean() + law(weight),
        {"overlap_kernel"},
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
    assert broken(gathered, transformation="bare") == {}
    assert "column_usage" in broken(gathered, transformation="jit")


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
        weighed={"some_law": 3},
        shapes=(SHAPE,) * 3,
        kinds=reference.KINDS[:3],
    )
    (fault,) = check.broken(found, BOUNDS)
    assert fault.seed == 1
    assert fault.kind == "blind rows"
    assert (fault.error, fault.bound) == (np.inf, 1e-12)
    assert check.broken(found, check.Bounds(np.inf, 1, 1)) == []


def test_shapes_have_room_and_ones():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        roomy, ones, *others = check.deal_shapes(rng, 8, 16, 8)
        assert min(roomy[:6]) >= 3
        assert roomy.num_heads >= 2 * roomy.num_kv_heads >= 4
        assert ones == (1, 1, 1, 1, 1, 2, 1, 1)
        for shape in others:
            assert max(shape.queries, shape.sources) <= 16
            assert shape.num_heads % shape.num_kv_heads == 0
            assert shape.num_classes >= 2


@pytest.mark.parametrize("kind", reference.KINDS)
def test_problems_are_what_they_are_called(x64, kind):
    drawn = [
        reference.draw_problem(np.random.default_rng(seed), SHAPE, kind)
        for seed in range(20)
    ]
    outcomes = [reference.forward(p, "plain", {})[0] for p in drawn]
    scores = np.array([np.abs(outcome.score).max() for outcome in outcomes])
    assert np.isfinite([float(outcome.loss) for outcome in outcomes]).all()
    if kind == "one-hot":
        assert 1e3 < np.median(scores) < 1e5
        assert scores.max() > 1e4
    elif kind == "uniform":
        assert scores.max() == 0
    elif kind == "blind rows":
        assert np.mean([(~p.mask.any(axis=1)).mean() for p in drawn]) > 0.3
    elif kind == "no weights":
        assert all((p.weights == 0).all() for p in drawn)
    elif kind == "zero weights":
        assert np.mean([(p.weights == 0).mean() for p in drawn]) > 0.3
    elif kind.endswith("values"):
        size = np.median([np.abs(p.params.w_v).mean() for p in drawn])
        assert size == pytest.approx({"t": 1e-6, "h": 1e6}[kind[0]], rel=0.5)


def test_the_second_implementation_agrees_with_the_first(x64):
    problem = reference.draw_problem(np.random.default_rng(0), SHAPE, "blind rows")
    _, stages = reference.forward(problem, "own", {})
    first = attention.forward(problem.params, problem.inputs, problem.own_mask)
    for name in ("query", "key", "value", "score", "weight", "context", "logit"):
        np.testing.assert_allclose(
            getattr(first, name), getattr(stages, name), rtol=1e-12, atol=1e-13
        )


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
    steps = check._STEPS
    along = np.stack([function(steps), function(-steps)])[None]
    assert check._slope(along)[0] == pytest.approx(slope, rel=1e-5)
