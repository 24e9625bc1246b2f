"""The transformer: one head of it is the head, and each head obeys the laws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import relative_error
from small_models import (
    CLASSES,
    LENGTH,
    ONE_HEAD,
    TOKENS,
    architecture,
    drawn,
    forward,
    one_head_problem,
    targets,
    tokens,
)

from jaxattn.kernels import streaming
from jaxattn.models import transformer
from jaxattn.theory import attention, laws, losses

MODEL = architecture()


def loss_of(logit, labels):
    return losses.cross_entropy(logit, labels)


# --- one head


def test_one_layer_with_one_head_is_the_head_and_obeys_the_laws(x64):
    params, head, inputs = one_head_problem()
    labels, mask = targets(2), attention.causal_mask(LENGTH)

    @jax.jit
    def run(params):
        found = transformer.apply(ONE_HEAD, params, inputs)
        return loss_of(found.logit, labels), found

    (loss, found), gradient = jax.value_and_grad(run, has_aux=True)(params)
    expected = jax.jit(attention.forward)(head, inputs, mask)
    (layer,) = found.heads
    for mine, theirs in (
        (layer.query[:, 0], expected.query),
        (layer.key[:, 0], expected.key),
        (layer.value[:, 0], expected.value),
        (layer.context[:, 0], expected.context),
        (found.logit, expected.logit),
    ):
        assert relative_error(mine, theirs) < 1e-14

    value, by_laws = jax.jit(laws.loss_and_gradient)(head, inputs, labels, mask)
    assert relative_error(loss, value) < 1e-14
    block = gradient["blocks"][0]["attention"]
    for name, law in (
        ("query", by_laws.w_q),
        ("key", by_laws.w_k),
        ("value", by_laws.w_v),
    ):
        assert relative_error(block[name]["kernel"], law) < 1e-12
    # W_O is the product of two matrices here.
    mixed = np.asarray(params["blocks"][0]["attention"]["output"]["kernel"])
    by_product = mixed.T @ np.asarray(by_laws.w_o)
    assert relative_error(gradient["unembed"]["kernel"], by_product) < 1e-12


# --- the laws of every head


def dense_attend(added):
    """`streaming.attend` with all of a, and additions to scores, values, contexts.

    Autodiff with respect to these is the third witness: it uses no law.
    """
    layers = iter(added)

    def attend(query, key, value, **options):
        assert options["causal"]
        score, content, context = next(layers)
        num_heads = query.shape[1]
        key = attention.repeat_heads(key, num_heads)
        value = attention.repeat_heads(value, num_heads) + content
        s = jnp.einsum("thd,shd->hts", query, key) / np.sqrt(query.shape[2]) + score
        mask = attention.causal_mask(len(query))
        weight = jax.nn.softmax(jnp.where(mask[None], s, -jnp.inf), axis=2)
        return jnp.einsum("hts,shd->thd", weight, value) + context

    return attend


@jax.jit
@jax.vmap
def of_head(query, key, value, upstream):
    """Gradients and statistics of one causal head by the laws."""
    mask = attention.causal_mask(len(query))
    a = attention.weights(attention.scores(query, key), mask)
    advantage = laws.advantage(a, laws.compatibility(upstream, value))
    score_gradient = laws.score_gradient(a, advantage)
    value_gradient = laws.value_gradient(a, upstream)
    return score_gradient, value_gradient, a, advantage


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="pre"),
        pytest.param(
            {"norm": "post", "value_norm": True, "positions": "learned", "depth": 3},
            id="post",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"norm": "none", "kv_heads": 4, "mlp_width": 0, "residual": False},
            id="bare",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_head_obeys_the_laws_inside_several_layers(x64, monkeypatch, changes):
    model = architecture(**changes)
    params, inputs, labels = drawn(model, np.float64), tokens(3), targets(4)
    heads, width = model.heads, model.d_head

    def with_taps(taps):
        found = transformer.apply(model, params, inputs, taps=taps)
        return loss_of(found.logit, labels), found

    taps = transformer.zero_taps(model, LENGTH, jnp.float64)
    run = jax.jit(jax.value_and_grad(with_taps, has_aux=True))
    (loss, found), statistics = run(taps)

    def dense(added):
        monkeypatch.setattr(streaming, "attend", dense_attend(added))
        return loss_of(transformer.apply(model, params, inputs).logit, labels)

    shapes = (heads, LENGTH, LENGTH), (LENGTH, heads, width), (LENGTH, heads, width)
    nothing = [[np.zeros(shape) for shape in shapes] for _ in range(model.depth)]
    value, by_autodiff = jax.jit(jax.value_and_grad(dense))(nothing)
    assert relative_error(loss, value) < 1e-13
    for of_layer, layer, (score, content, context) in zip(
        statistics, found.heads, by_autodiff, strict=True
    ):
        query, upstream = (np.swapaxes(x, 0, 1) for x in (layer.query, context))
        key, values = (
            np.repeat(np.swapaxes(x, 0, 1), heads // x.shape[1], axis=0)
            for x in (layer.key, layer.value)
        )
        by_laws = jax.tree.map(np.asarray, of_head(query, key, values, upstream))
        score_gradient, value_gradient, a, advantage = by_laws
        assert relative_error(score_gradient, score) < 1e-11
        assert relative_error(value_gradient, np.swapaxes(content, 0, 1)) < 1e-11
        entropy = -np.sum(a * np.log(np.where(a > 0, a, 1)), axis=(1, 2))
        for name, expected in (
            ("score_gradient_norm", np.linalg.norm(score, axis=(1, 2))),
            ("value_gradient_norm", np.linalg.norm(content, axis=(0, 2))),
            ("routing_pressure", np.sum(a * advantage**2, axis=(1, 2))),
            ("column_usage", np.sum(a, axis=1)),
            ("routing_entropy", entropy),
        ):
            assert relative_error(getattr(of_layer, name), expected) < 1e-9


# --- options of the architecture


OPTIONS = {
    "residual": {"residual": False},
    "pre": {"norm": "none"},
    "post": {"norm": "post"},
    "value norm": {"value_norm": True},
    "no MLP": {"mlp_width": 0},
    "no positions": {"positions": "none"},
    "learned": {"positions": "learned"},
    "all key-value heads": {"kv_heads": 4},
    "depth": {"depth": 2},
    "no bias": {"bias": False},
}


def test_every_option_changes_the_output():
    outputs = {}
    for name, changes in {"": {}, **OPTIONS}.items():
        model = architecture(**{"depth": 1} | changes)
        # Not compiled as a whole: most operations are the same for all options.
        logit = np.asarray(transformer.apply(model, drawn(model), tokens(0)).logit)
        assert logit.shape == (LENGTH, CLASSES)
        assert np.isfinite(logit).all()
        outputs[name] = logit
    names = list(outputs)
    for n, name in enumerate(names):
        for other in names[:n]:
            assert np.abs(outputs[name] - outputs[other]).max() > 1e-4, (name, other)


@pytest.mark.parametrize("kind", transformer.KINDS)
def test_outputs_depend_on_no_later_input(kind):
    positions = "rotary" if kind == "transformer" else "learned"
    model = architecture(kind=kind, num_tokens=0, d_x=3, positions=positions)
    inputs = np.random.default_rng(1).normal(size=(LENGTH, 3)).astype(np.float32)
    # One of these for each position, at which it differs from the first.
    several = np.tile(inputs, (LENGTH + 1, 1, 1))
    several[np.arange(1, LENGTH + 1), np.arange(LENGTH)] += 1
    params = drawn(model)
    run = jax.jit(jax.vmap(lambda x: transformer.apply(model, params, x).logit))
    logit = np.asarray(run(several))
    moved = np.abs(logit[1:] - logit[:1]).max(axis=2)  # (changed input, output)
    depends = np.eye(LENGTH) if kind == "mlp" else np.tri(LENGTH)
    assert (moved[depends.T == 0] < 1e-6).all()
    assert (moved[depends.T == 1] > 1e-5).all()


def test_shared_heads_are_copies_of_one():
    few, all_ = architecture(depth=1), architecture(depth=1, kv_heads=4)
    params = drawn(few)
    copied = jax.tree.map(np.asarray, params)
    for block in copied["blocks"].values():
        for name in ("key", "value"):
            for leaf, array in block["attention"][name].items():
                heads = array.reshape(*array.shape[:-1], 2, few.d_head)
                shared = np.repeat(heads, 2, axis=-2)
                flat = shared.reshape(*array.shape[:-1], -1)
                block["attention"][name][leaf] = flat
    np.testing.assert_allclose(
        forward(few, params, tokens(0)).logit,
        forward(all_, copied, tokens(0)).logit,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", transformer.KINDS)
def test_size_counts_the_parameters(kind):
    model = architecture(kind=kind, positions="learned")
    count = sum(leaf.size for leaf in jax.tree.leaves(drawn(model)))
    assert transformer.size(model) == count


def test_init_starts_small_and_without_positions():
    # Almost all of one shape, which is drawn by one program.
    eight = dict.fromkeys(("num_tokens", "num_classes", "length", "mlp_width"), 8)
    heads = dict.fromkeys(("heads", "kv_heads"), 2)
    model = architecture(**eight, **heads, d_head=4, positions="learned", depth=1)
    params = transformer.init(model, jax.random.key(0))
    other = transformer.init(model, jax.random.key(1))
    for one, two in zip(*map(jax.tree.leaves, (params, other)), strict=True):
        assert np.isfinite(one).all()
        assert np.abs(one).max() < 5
        assert np.any(one != two) or not np.any(one)
    assert not np.any(params["embed"]["position"]["embedding"])
    assert np.any(params["unembed"]["kernel"])


def test_dropout_depends_on_its_key_and_differs_between_layers():
    model = architecture(dropout_rate=0.5)
    params = drawn(model)

    def contexts(key):
        found = forward(model, params, tokens(0), key=key)
        return [np.asarray(layer.context) for layer in found.heads]

    plain, again = contexts(None), contexts(jax.random.key(1))
    np.testing.assert_array_equal(again, contexts(jax.random.key(1)))
    assert np.abs(again[0] - contexts(jax.random.key(2))[0]).max() > 0.01
    undropped = forward(MODEL, params, tokens(0)).heads[0].context
    np.testing.assert_array_equal(plain[0], undropped)
    # The first query has one source: it keeps it, twice as large, or loses it.
    ratio = np.stack(again)[:, 0] / np.stack(plain)[:, 0]
    assert set(np.round(ratio[0].ravel(), 4)) <= {0.0, 2.0}
    assert np.abs(ratio[0] - ratio[1]).max() > 0.1


@pytest.mark.slow
def test_seeds_may_be_mapped_over():
    model = architecture(depth=1)
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.jit(jax.vmap(lambda key: transformer.init(model, key)))(keys)
    inputs = np.stack([tokens(seed) for seed in range(3)])
    together = jax.jit(jax.vmap(lambda p, x: forward(model, p, x).logit))(
        params, inputs
    )
    for n in range(3):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], params)
        alone = forward(model, own, inputs[n]).logit
        np.testing.assert_allclose(together[n], alone, rtol=1e-4, atol=1e-5)


def test_fixed_attention_does_not_move():
    params = drawn(MODEL)
    found = forward(MODEL, params, tokens(0))
    held = tuple(transformer.Held(h.query, h.key) for h in found.heads)

    @jax.jit
    def run(params):
        logit = transformer.apply(MODEL, params, tokens(0), held=held).logit
        return loss_of(logit, targets(1)), logit

    (_, logit), slope = jax.value_and_grad(run, has_aux=True)(params)
    np.testing.assert_allclose(logit, found.logit, rtol=1e-6, atol=1e-6)
    for layer in slope["blocks"].values():
        for name in ("query", "key"):
            assert not np.any(layer["attention"][name]["kernel"])
        assert np.any(layer["attention"]["value"]["kernel"])


# --- ablation


def no_ablation(model):
    return transformer.Ablation(
        np.zeros((model.depth, model.heads), bool),
        np.zeros(model.depth, bool),
        np.zeros((model.depth, model.heads, model.d_head), np.float32),
        np.zeros((model.depth, model.width), np.float32),
    )


def test_a_head_that_is_zeroed_is_one_that_is_not_read():
    params, ablation = drawn(MODEL), no_ablation(MODEL)
    ablation.heads[1, 2] = True
    found = np.asarray(forward(MODEL, params, tokens(0), ablation=ablation).logit)
    kernel = params["blocks"][1]["attention"]["output"]["kernel"]
    kernel[2 * MODEL.d_head : 3 * MODEL.d_head] = 0
    expected = forward(MODEL, params, tokens(0)).logit
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_mlp_is_replaced_by_a_constant():
    params, ablation = drawn(MODEL), no_ablation(MODEL)
    ablation.mlps[0] = True
    ablation.mlp[0] = np.arange(8)
    found = forward(MODEL, params, tokens(0), ablation=ablation)
    np.testing.assert_array_equal(found.mlp[0], np.tile(ablation.mlp[0], (LENGTH, 1)))
    same = forward(MODEL, params, tokens(0), ablation=no_ablation(MODEL))
    plain = forward(MODEL, params, tokens(0))
    np.testing.assert_allclose(same.logit, plain.logit, rtol=1e-6, atol=1e-6)
    assert np.abs(found.logit - plain.logit).max() > 1e-3


# --- parameters and inputs


def test_wrong_parameters_are_named():
    transformer.check_params(MODEL, drawn(MODEL))

    partial = drawn(MODEL)
    del partial["blocks"][1]["attention"]["key"]
    with pytest.raises(
        transformer.ParamsError, match=r"blocks\.1\.attention\.key\.kernel is missing"
    ):
        forward(MODEL, partial, tokens(0))

    wider = drawn(dataclasses.replace(MODEL, mlp_width=11))
    with pytest.raises(
        transformer.ParamsError,
        match=r"blocks\.0\.mlp\.up\.kernel is \(8, 11\), must be \(8, 10\)",
    ):
        transformer.check_params(MODEL, wider)

    deeper = drawn(dataclasses.replace(MODEL, depth=3))
    with pytest.raises(
        transformer.ParamsError, match=r"blocks\.2\.\S+ is unknown.*; must be those"
    ):
        transformer.check_params(MODEL, deeper)


def test_every_parameter_has_a_role():
    params = drawn(architecture(positions="learned"))
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    role_of = {
        ".".join(str(p.key) for p in path): transformer.role_of(path)
        for path, _ in paths
    }
    assert set(role_of.values()) == set(transformer.ROLES)
    for name, role in role_of.items():
        if "attention" in name:
            assert name.split(".")[3] == role
    assert role_of["unembed.kernel"] == "output"
    assert role_of["embed.position.embedding"] == "embed"
    ((path, _),), _ = jax.tree_util.tree_flatten_with_path({"gain": 0})
    assert transformer.role_of(path) is None


@pytest.mark.parametrize("token", [-1, TOKENS, 99])
def test_an_unknown_token_makes_nan_of_the_queries_that_attend_to_it(token):
    params, inputs = drawn(MODEL), tokens(0)
    wanted = forward(MODEL, params, inputs).logit
    unknown = np.where(np.arange(len(inputs)) == 4, token, inputs).astype(inputs.dtype)
    logit = forward(MODEL, params, unknown).logit
    np.testing.assert_array_equal(logit[:4], wanted[:4])
    assert np.isnan(logit[4:]).all()


def test_more_inputs_than_learned_positions():
    model = architecture(positions="learned")
    with pytest.raises(ValueError, match="of length 10: must be at most 9 long"):
        transformer.apply(model, drawn(model), tokens(0, LENGTH + 1))
