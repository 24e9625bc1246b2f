"""What a config is told of each task, against what the task draws."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import draw

from jaxattn import tasks
from jaxattn.tasks import SPECS

SIZES = {
    "sticky": {
        "length": 9,
        "num_symbols": 4,
        "d_x": 3,
        "stay": 0.3,
        "embedding_seed": -1,
    },
    "toy": {"length": 4, "num_classes": 3, "d_x": 2},
    "bijection": {"num_symbols": 4, "num_pairs": 3},
    "hmm": {"num_states": 3, "num_symbols": 4, "num_observations": 5},
    "fixed_hmm": {"process": "mess3", "length": 4},
    "recall": {
        "num_keys": 5,
        "num_values": 3,
        "num_pairs": 2,
        "num_queries": 3,
        "filler": 1,
        "novel": 0.5,
    },
}
TOKENS = [name for name, spec in SPECS.items() if not spec.head]
SEQUENCES = 200


@pytest.fixture(scope="module")
def drawn():
    """Sequences of each task, and their exact posteriors."""

    def several(name):
        task = SPECS[name].build(SIZES[name], jax.random.key(1))
        keys = jax.random.split(jax.random.key(0), SEQUENCES)
        return jax.jit(jax.vmap(lambda key: draw(task, key)))(keys)

    return {name: jax.tree.map(np.asarray, several(name)) for name in SPECS}


def test_specs_are_read_only():
    assert set(SIZES) == set(SPECS)
    with pytest.raises(TypeError):
        SPECS["mine"] = SPECS["toy"]


@pytest.mark.parametrize("name", SPECS)
def test_fields_are_those_that_the_task_is_built_from(name):
    rules = SPECS[name].fields
    assert set(rules) == set(SIZES[name])
    for field, value in SIZES[name].items():
        assert rules[field].accepts(value)
        assert not rules[field].accepts(None)


@pytest.mark.parametrize("name", SPECS)
def test_sizes_are_those_of_what_is_drawn(drawn, name):
    spec, fields, (batch, log_bayes) = SPECS[name], SIZES[name], drawn[name]
    sizes = SEQUENCES, spec.positions(fields)
    assert batch.inputs.shape[:2] == sizes
    assert log_bayes.shape == (*sizes, spec.num_classes(fields))
    np.testing.assert_allclose(np.exp(log_bayes).sum(axis=2), 1, atol=1e-5)
    if spec.transformer is None:
        return
    of = spec.transformer
    weights = np.ones(sizes) if batch.weights is None else batch.weights
    assert ((weights > 0).sum(axis=1) == of.scored(fields)).all()
    if of.num_tokens(fields) == 0:
        assert batch.inputs.shape[2] == fields["d_x"]
        return
    tokens = batch.inputs
    assert tokens.max() == of.num_tokens(fields) - 1
    assert tokens.min() == (5 if name == "hmm" else 0)  # hundredths
    keys = of.keys(fields)
    is_key = (tokens >= keys.first_token) & (tokens < keys.end_token)
    assert (is_key.sum(axis=1) >= keys.count).all()
    assert keys.count > 0


def test_a_field_makes_sequences_longer_and_nothing_else():
    longer = {n: spec.transformer.longer for n, spec in SPECS.items() if not spec.head}
    assert longer.pop("bijection") is None  # it cannot: no key is shown twice
    for name, field in longer.items():
        spec, fields = SPECS[name], SIZES[name]
        more = fields | {field: fields[field] + 7}
        assert spec.positions(more) == spec.positions(fields) + 7
        assert spec.num_classes(more) == spec.num_classes(fields)
        assert spec.transformer.num_tokens(more) == spec.transformer.num_tokens(fields)


@pytest.mark.parametrize("name", ["toy", "bijection", "recall"])
def test_entropy_rate_is_the_mean_entropy_of_bayes(drawn, name):
    batch, log_bayes = drawn[name]
    plogp = np.exp(log_bayes) * np.where(np.isfinite(log_bayes), log_bayes, 0)
    entropy = -plogp.sum(axis=2)
    weights = np.ones_like(entropy) if batch.weights is None else batch.weights
    means = np.average(entropy, axis=1, weights=weights)
    error = np.std(means) / math.sqrt(SEQUENCES)
    rate = SPECS[name].entropy_rate(SIZES[name])
    assert abs(means.mean() - rate) < 4 * error + 1e-6


@pytest.mark.parametrize("name", ["hmm", "fixed_hmm"])
def test_entropy_rate_is_left_open_where_there_is_no_formula(name):
    assert SPECS[name].entropy_rate(SIZES[name]) is None


def test_beliefs_of_a_fixed_process_are_of_its_states():
    beliefs = SPECS["fixed_hmm"].transformer.log_beliefs
    log_belief = jax.jit(lambda tokens: beliefs(SIZES["fixed_hmm"], tokens))(
        jnp.array([0, 2, 1, 1], jnp.int32)
    )
    assert log_belief.shape == (4, 3)
    np.testing.assert_allclose(np.exp(log_belief).sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        *((name, {}, None) for name in TOKENS),
        ("bijection", {"num_pairs": 4}, None),
        ("bijection", {"num_pairs": 5}, ("num_pairs", "at most num_symbols, 4")),
        ("hmm", {"num_states": 20, "num_symbols": 20}, None),
        ("hmm", {"num_states": 21}, ("num_states", "at most 20: no probability is")),
        ("hmm", {"num_symbols": 21}, ("num_symbols", "at most 20: no probability is")),
        ("recall", {"num_pairs": 6}, ("num_pairs", "at most num_keys, 5")),
        ("recall", {"num_pairs": 5}, ("novel", "0 where every key is shown")),
        ("recall", {"num_pairs": 5, "novel": 0}, None),
    ],
)
def test_fields_that_do_not_fit_together_are_named(name, changes, wrong):
    found = SPECS[name].transformer.wrong(SIZES[name] | changes)
    if wrong is None:
        assert found is None
    else:
        field, must = wrong
        assert found[0] == field
        assert found[1].startswith(must)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("double", [False, True])
def test_shapes_are_as_said_in_both_precisions(name, double):
    spec, fields = SPECS[name], SIZES[name]
    task = spec.build(fields, jax.random.key(0))
    with jax.enable_x64(double):
        batch, log_bayes = jax.eval_shape(
            lambda key: draw(task, key), jax.random.key(0)
        )
    length, dtype = spec.positions(fields), jnp.float64 if double else jnp.float32
    predicted = ((length, spec.num_classes(fields)), dtype)
    found = [None if x is None else (x.shape, x.dtype) for x in (*batch, log_bayes)]
    assert found == [
        ((length,), jnp.int32),
        predicted if name == "hmm" else ((length,), jnp.int32),
        None if name == "fixed_hmm" else ((length,), jnp.float32),
        predicted,
    ]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (name, field, value)
        for name, sizes in SIZES.items()
        for field in sizes
        if field != "embedding_seed"
        for value in (
            {"process": ["none"], "stay": [-0.1, 2], "novel": [-0.1, np.nan]}.get(
                field, [-1, 2.5]
            )
        )
    ],
)
def test_a_number_that_no_task_has_is_named(name, field, value):
    sizes = {n: v for n, v in SIZES[name].items() if n != "embedding_seed"}
    extra = {"embedding_key": jax.random.key(0)} if name == "sticky" else {}
    build = getattr(tasks, name)
    build(**sizes, **extra)
    with pytest.raises(ValueError, match=rf"^{field}={value!r}: must be "):
        build(**sizes | {field: value}, **extra)
