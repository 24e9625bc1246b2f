"""The transformer: one head of it is the head, and each head obeys the laws."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import relative_error

from jaxattn.algorithms import SPECS, LayeredModel, descent, layered_em, roles, specs
from jaxattn.algorithms.em import em
from jaxattn.kernels import streaming
from jaxattn.models import transformer
from jaxattn.models.transformer import Architecture
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses, m_steps

TOKENS, CLASSES, LENGTH = 7, 5, 9


def architecture(**changes):
    fields = {
        "kind": "transformer",
        "num_tokens": TOKENS,
        "d_x": 0,
        "num_classes": CLASSES,
        "length": LENGTH,
        "depth": 3,
        "width": 8,
        "heads": 4,
        "kv_heads": 2,
        "d_head": 6,
        "mlp_width": 10,
        "residual": True,
        "norm": "pre",
        "positions": "rotary",
        "bias": True,
    }
    return Architecture(**fields | changes)


ONE_HEAD = architecture(
    num_tokens=0,
    d_x=8,
    depth=1,
    heads=1,
    kv_heads=1,
    mlp_width=0,
    residual=False,
    norm="none",
    positions="none",
    bias=False,
)


forward = jax.jit(transformer.apply, static_argnums=0)


@functools.lru_cache
def init(model):
    return jax.jit(transformer.init, static_argnums=0)(model, jax.random.key(0))


def tokens(seed, length=LENGTH):
    return jnp.asarray(np.random.default_rng(seed).integers(0, TOKENS, length))


def targets(seed, length=LENGTH):
    return jnp.asarray(np.random.default_rng(seed).integers(0, CLASSES, length))


def drawn(model, seed=0):
    """Parameters in float64 that are zero nowhere, biases neither."""
    rng = np.random.default_rng(seed)
    key = jax.random.key(0)
    shapes = jax.eval_shape(functools.partial(transformer.init, model), key)
    return jax.tree.map(lambda s: 0.3 * jnp.asarray(rng.normal(size=s.shape)), shapes)


# --- one head


def one_head_problem():
    """A transformer that is one head, and the same head as `attention` has it."""
    params = drawn(ONE_HEAD)
    params["embed"]["vector"]["kernel"] = jnp.eye(8)
    inputs = jnp.asarray(np.random.default_rng(1).normal(size=(LENGTH, 8)))
    block = params["blocks"][0]["attention"]
    head = attention.Params(
        *(block[name]["kernel"] for name in ("query", "key", "value")),
        block["output"]["kernel"] @ params["unembed"]["kernel"],
    )
    return params, head, inputs


@pytest.mark.usefixtures("x64")
def test_one_layer_with_one_head_is_the_head():
    params, head, inputs = one_head_problem()
    mask = attention.causal_mask(LENGTH)
    found = forward(ONE_HEAD, params, inputs)
    expected = attention.forward(head, inputs, mask)
    (layer,) = found.heads
    for mine, theirs in (
        (layer.query[:, 0], expected.query),
        (layer.key[:, 0], expected.key),
        (layer.value[:, 0], expected.value),
        (layer.context[:, 0], expected.context),
        (found.logit, expected.logit),
    ):
        assert relative_error(mine, theirs) < 1e-14


@pytest.mark.usefixtures("x64")
def test_its_gradient_is_that_of_the_laws():
    params, head, inputs = one_head_problem()
    labels = targets(2)

    def loss(params):
        logit = forward(ONE_HEAD, params, inputs).logit
        return losses.cross_entropy(logit, labels)

    mask = attention.causal_mask(LENGTH)
    value, by_laws = laws.loss_and_gradient(head, inputs, labels, mask)
    found, gradient = jax.value_and_grad(loss)(params)
    assert relative_error(found, value) < 1e-14
    block = gradient["blocks"][0]["attention"]
    for name, law in (
        ("query", by_laws.w_q),
        ("key", by_laws.w_k),
        ("value", by_laws.w_v),
    ):
        assert relative_error(block[name]["kernel"], law) < 1e-12
    # W_O is the product of two here.
    mixed = params["blocks"][0]["attention"]["output"]["kernel"]
    assert relative_error(gradient["unembed"]["kernel"], mixed.T @ by_laws.w_o) < 1e-12


# --- the laws of every head


def dense_attend(moved):
    """`streaming.attend` with all of a, and something added to scores and values.

    Autodiff with respect to what is added is the third witness: it knows no law.
    """
    calls = iter(range(len(moved)))

    def attend(query, key, value, **options):
        assert options["causal"]
        score, content, context = moved[next(calls)]
        num_heads = query.shape[1]
        key = attention.repeat_heads(key, num_heads)
        value = attention.repeat_heads(value, num_heads) + content
        s = jnp.einsum("thd,shd->hts", query, key) / np.sqrt(query.shape[2]) + score
        mask = attention.causal_mask(len(query))
        weight = jax.nn.softmax(jnp.where(mask[None], s, -jnp.inf), axis=2)
        return jnp.einsum("hts,shd->thd", weight, value) + context

    return attend


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="pre"),
        pytest.param(
            {"norm": "post", "value_norm": True, "positions": "learned"},
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
def test_each_head_obeys_the_laws_inside_three_layers(monkeypatch, changes):
    model = architecture(**changes)
    params, inputs, labels = drawn(model), tokens(3), targets(4)
    heads, width = model.heads, model.d_head
    nothing = [
        (
            jnp.zeros((heads, LENGTH, LENGTH)),
            jnp.zeros((LENGTH, heads, width)),
            jnp.zeros((LENGTH, heads, width)),
        )
        for _ in range(model.depth)
    ]

    def with_taps(taps):
        found = forward(model, params, inputs, taps=taps)
        return losses.cross_entropy(found.logit, labels), found

    taps = transformer.zero_taps(model, LENGTH, jnp.float64)
    (loss, found), statistics = jax.value_and_grad(with_taps, has_aux=True)(
        jax.tree.map(jnp.asarray, taps)
    )

    def dense(moved):
        monkeypatch.setattr(streaming, "attend", dense_attend(moved))
        logit = transformer.apply(model, params, inputs).logit
        return losses.cross_entropy(logit, labels)

    value, by_autodiff = jax.value_and_grad(dense)(nothing)
    assert relative_error(loss, value) < 1e-13
    mask = attention.causal_mask(LENGTH)
    for layer, (score, content, context) in enumerate(by_autodiff):
        seen, of_layer = found.heads[layer], statistics[layer]
        keys, values = (
            attention.repeat_heads(a, heads) for a in (seen.key, seen.value)
        )
        for head in range(heads):
            a = attention.weights(
                attention.scores(seen.query[:, head], keys[:, head]), mask
            )
            u = context[:, head]
            advantage = laws.advantage(a, laws.compatibility(u, values[:, head]))
            by_law = laws.score_gradient(a, advantage)
            assert relative_error(by_law, score[head]) < 1e-11
            of_values = laws.value_gradient(a, u)
            assert relative_error(of_values, content[:, head]) < 1e-11
            for name, expected in (
                ("score_gradient_norm", np.linalg.norm(score[head])),
                ("value_gradient_norm", np.linalg.norm(content[:, head])),
                ("routing_pressure", np.sum(a * advantage**2)),
                ("column_usage", np.sum(a, axis=0)),
                ("routing_entropy", np.sum(attention.attention_entropy(a))),
            ):
                assert relative_error(getattr(of_layer, name)[head], expected) < 1e-9


# --- options


OPTIONS = {
    "residual": {"residual": False},
    "pre": {"norm": "none"},
    "post": {"norm": "post"},
    "value norm": {"value_norm": True},
    "no MLP": {"mlp_width": 0},
    "no positions": {"positions": "none"},
    "learned": {"positions": "learned"},
    "all key-value heads": {"kv_heads": 4},
    "depth": {"depth": 1},
    "no bias": {"bias": False},
}


def looks_at(model, params, inputs):
    """(T, T) which inputs an output hangs on, by its gradient."""

    def logit(embedded):
        return forward(model, params, embedded).logit

    slope = jax.jacrev(logit)(inputs)
    return np.abs(slope).sum(axis=(1, 3)) > 0


def test_every_option_changes_what_comes_out():
    base = architecture()
    outputs = {}
    for name, changes in {"": {}, **OPTIONS}.items():
        model = dataclasses.replace(base, **changes)
        params = transformer.init(model, jax.random.key(0))
        logit = transformer.apply(model, params, tokens(0)).logit
        assert logit.shape == (LENGTH, CLASSES)
        assert np.isfinite(logit).all()
        outputs[name] = np.asarray(logit)
    names = list(outputs)
    for n, name in enumerate(names):
        for other in names[:n]:
            assert np.abs(outputs[name] - outputs[other]).max() > 1e-4, (name, other)


@pytest.mark.parametrize("kind", transformer.KINDS)
def test_nothing_looks_ahead(kind):
    positions = "rotary" if kind == "transformer" else "learned"
    model = architecture(kind=kind, num_tokens=0, d_x=3, positions=positions, depth=2)
    inputs = jax.random.normal(jax.random.key(1), (LENGTH, 3))
    params = init(model)
    seen = looks_at(model, params, inputs)
    wanted = np.eye(LENGTH) if kind == "mlp" else np.tri(LENGTH)
    np.testing.assert_array_equal(seen, wanted.astype(bool))


def test_a_history_is_all_that_lies_behind_and_no_more():
    x = jnp.arange(1.0, 5)[:, None]
    found = np.asarray(transformer._history(x, 3))
    np.testing.assert_array_equal(found, [[1, 0, 0], [2, 1, 0], [3, 2, 1], [4, 3, 2]])


def test_shared_heads_are_copies_of_one():
    few, all_ = architecture(kv_heads=2), architecture(kv_heads=4)
    params = init(few)
    copied = jax.tree.map(lambda leaf: leaf, params)
    for block in copied["blocks"].values():
        for name in ("key", "value"):
            for leaf, array in block["attention"][name].items():
                heads = array.reshape(*array.shape[:-1], 2, few.d_head)
                shared = jnp.repeat(heads, 2, axis=-2)
                flat = shared.reshape(*array.shape[:-1], -1)
                block["attention"][name][leaf] = flat
    np.testing.assert_allclose(
        forward(few, params, tokens(0)).logit,
        forward(all_, copied, tokens(0)).logit,
        rtol=1e-5,
        atol=1e-6,
    )


def test_rotated_products_hang_on_the_distance_alone():
    rng = np.random.default_rng(0)
    one = jnp.asarray(rng.normal(size=(1, 1, 6)), jnp.float32)
    other = jnp.asarray(rng.normal(size=(1, 1, 6)), jnp.float32)
    q, k = (transformer.rotate(jnp.tile(x, (12, 1, 1)))[:, 0] for x in (one, other))
    product = np.asarray(q @ k.T)
    for distance in range(-5, 6):
        along = np.diagonal(product, distance)
        np.testing.assert_allclose(along, along[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(product[0]) > 0.1
    np.testing.assert_allclose(
        np.linalg.norm(q, axis=1), np.linalg.norm(one), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_angles_are_not_in_half_precision(dtype):
    turned = transformer.rotate(jnp.ones((70_000, 1, 50), dtype))
    assert turned.dtype == dtype
    turned = np.asarray(turned, np.float64)
    product = np.sum(turned[1:] * turned[:-1], axis=(1, 2))
    rate = 10_000.0 ** (-np.arange(0, 50, 2) / 50)
    rounding = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(product, 2 * np.cos(rate).sum(), rtol=0.01 + rounding)


def test_dropout_hangs_on_its_key_and_differs_between_layers():
    model = architecture(dropout_rate=0.5, depth=2)
    params = init(model)

    def contexts(key):
        return [h.context for h in forward(model, params, tokens(0), key=key).heads]

    plain, again = contexts(None), contexts(jax.random.key(1))
    np.testing.assert_array_equal(again, contexts(jax.random.key(1)))
    assert np.abs(again[0] - contexts(jax.random.key(2))[0]).max() > 0.01
    undropped = forward(
        dataclasses.replace(model, dropout_rate=0.0),
        params,
        tokens(0),
        key=jax.random.key(1),
    )
    np.testing.assert_array_equal(plain[0], undropped.heads[0].context)
    # The first query sees one source: it keeps it, twice as large, or loses it.
    ratio = np.asarray(again)[:, 0] / np.asarray([h[0] for h in plain])
    assert set(np.round(ratio[0].ravel(), 4)) <= {0.0, 2.0}


@pytest.mark.slow
def test_seeds_may_be_mapped_over():
    model = architecture(depth=1)
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.jit(jax.vmap(functools.partial(transformer.init, model)))(keys)
    inputs = jnp.stack([tokens(seed) for seed in range(3)])
    together = jax.jit(jax.vmap(lambda p, x: forward(model, p, x).logit))(
        params, inputs
    )
    for n in range(3):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], params)
        alone = forward(model, own, inputs[n]).logit
        np.testing.assert_allclose(together[n], alone, rtol=1e-4, atol=1e-5)


def test_held_attention_does_not_move():
    model = architecture(depth=2)
    params = init(model)
    found = forward(model, params, tokens(0))
    held = tuple(transformer.Held(h.query, h.key) for h in found.heads)

    def loss(params):
        logit = forward(model, params, tokens(0), held=held).logit
        return losses.cross_entropy(logit, targets(1))

    logit = forward(model, params, tokens(0), held=held).logit
    np.testing.assert_array_equal(logit, found.logit)
    slope = jax.grad(loss)(params)["blocks"]
    for layer in slope.values():
        for name in ("query", "key"):
            assert not np.any(layer["attention"][name]["kernel"])
        assert np.any(layer["attention"]["value"]["kernel"])


# --- ablation


def test_a_head_that_is_zeroed_is_one_that_is_not_read():
    model = architecture(depth=2)
    params = jax.tree.map(lambda leaf: leaf, init(model))
    ablation = no_ablation(model)
    ablation = ablation._replace(heads=ablation.heads.at[1, 2].set(True))
    found = forward(model, params, tokens(0), ablation=ablation).logit
    kernel = params["blocks"][1]["attention"]["output"]["kernel"]
    rows = slice(2 * model.d_head, 3 * model.d_head)
    params["blocks"][1]["attention"]["output"]["kernel"] = kernel.at[rows].set(0)
    expected = forward(model, params, tokens(0)).logit
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_mlp_is_replaced_by_what_is_given():
    model = architecture(depth=2)
    params = init(model)
    ablation = no_ablation(model)
    constant = jnp.arange(8.0)
    ablation = ablation._replace(
        mlps=ablation.mlps.at[0].set(True), mlp=ablation.mlp.at[0].set(constant)
    )
    found = forward(model, params, tokens(0), ablation=ablation)
    np.testing.assert_array_equal(found.mlp[0], np.tile(constant, (LENGTH, 1)))
    same = forward(model, params, tokens(0), ablation=no_ablation(model))
    plain = forward(model, params, tokens(0))
    np.testing.assert_array_equal(same.logit, plain.logit)


def no_ablation(model):
    return transformer.Ablation(
        jnp.zeros((model.depth, model.heads), bool),
        jnp.zeros(model.depth, bool),
        jnp.zeros((model.depth, model.heads, model.d_head)),
        jnp.zeros((model.depth, model.width)),
    )


# --- parameters


def test_wrong_parameters_are_named():
    model = architecture(depth=2)
    params = init(model)
    transformer.check_params(model, params)

    partial = jax.tree.map(lambda leaf: leaf, params)
    del partial["blocks"][1]["attention"]["key"]
    with pytest.raises(
        transformer.ParamsError, match=r"blocks\.1\.attention\.key\.kernel is missing"
    ):
        forward(model, partial, tokens(0))

    wider = init(dataclasses.replace(model, mlp_width=11))
    with pytest.raises(
        transformer.ParamsError, match=r"blocks\.0\.mlp\.up\.kernel is \(8, 11\), not"
    ):
        transformer.check_params(model, wider)

    deeper = init(dataclasses.replace(model, depth=3))
    with pytest.raises(transformer.ParamsError, match=r"blocks\.2\.\S+ is not of it"):
        transformer.check_params(model, deeper)


@pytest.mark.parametrize("kind", transformer.KINDS)
def test_size_counts_the_parameters(kind):
    model = architecture(kind=kind, positions="learned")
    params = init(model)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert transformer.size(model) == count


# --- schedules


def test_every_parameter_has_a_role():
    model = architecture(positions="learned")
    params = init(model)
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    roles = {
        ".".join(str(p.key) for p in path): roles.role_of(path) for path, _ in paths
    }
    assert set(roles.values()) == set(roles.LAYER_ROLES)
    for name, role in roles.items():
        if "attention" in name:
            assert name.split(".")[3] == role
    assert roles["unembed.kernel"] == "output"
    assert roles["embed.position.embedding"] == "embed"
    tx = roles.by_role({roles.LAYER_ROLES: optax.sgd(0.1)}, roles=roles.LAYER_ROLES)
    with pytest.raises(roles.RoleError, match=r"'gain'.*has no role"):
        tx.init({"gain": jnp.zeros(2)})


def batch_of(count=3):
    inputs = jnp.stack([tokens(seed) for seed in range(count)])
    return Batch(inputs, jnp.stack([targets(10 + seed) for seed in range(count)]))


def batched(model):
    """Loss and gradient of a whole batch, and what layered EM needs."""

    def loss(params, batch, held=None):
        def one(x, y, held):
            logit = forward(model, params, x, held=held).logit
            return losses.cross_entropy(logit, y)

        return jnp.mean(jax.vmap(one)(batch.inputs, batch.targets, held))

    def hold(params, batch):
        found = jax.vmap(lambda x: forward(model, params, x))(batch.inputs)
        return tuple(transformer.Held(h.query, h.key) for h in found.heads)

    return (
        lambda p, b, key: jax.value_and_grad(loss)(p, b),
        layered_em.FixedModel(hold, jax.grad(loss)),
    )


RATES = {"routing_rate": 0.1, "value_rate": 0.3, "output_rate": 0.7}


def test_two_timescale_moves_every_layer_by_the_rate_of_its_role():
    model = architecture()
    params, batch = init(model), batch_of()
    loss_and_gradient, _ = batched(model)
    algorithm = SPECS["two_timescale"].layers(
        {}, RATES, LayeredModel(loss_and_gradient, None, steps=10)
    )
    state, _ = algorithm.step(algorithm.init(params), batch, jax.random.key(0))
    _, slope = loss_and_gradient(params, batch, None)
    rate_of = dict.fromkeys(("query", "key"), 0.1) | {"value": 0.3}
    moved, _ = jax.tree_util.tree_flatten_with_path(
        jax.tree.map(lambda a, b: a - b, state.params, params)
    )
    for (path, motion), g in zip(moved, jax.tree.leaves(slope), strict=True):
        rate = rate_of.get(roles.role_of(path), 0.7)
        np.testing.assert_allclose(motion, -rate * g, rtol=1e-3, atol=2e-7)


EM = {
    "optimizer": "sgd",
    "m_step": "gradient",
    "order": "simultaneous",
    "inner_steps": 1,
}


@pytest.mark.slow
def test_simultaneous_em_with_one_step_is_two_timescale():
    model = architecture()
    params, batch = init(model), batch_of()
    loss_and_gradient, held = batched(model)
    states = []
    for name, arm in (("em", EM), ("two_timescale", {})):
        model = LayeredModel(loss_and_gradient, held, steps=10)
        algorithm = SPECS[name].layers(arm, RATES, model)
        step, state = jax.jit(algorithm.step), algorithm.init(params)
        for _ in range(3):
            state, _ = step(state, batch, jax.random.key(0))
        states.append(state.params)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("order", "inner"),
    [
        ("alternating", 3),
        pytest.param("simultaneous", 2, marks=pytest.mark.slow),
    ],
)
def test_em_of_one_layer_is_em_of_the_head(order, inner):
    params, head, inputs = one_head_problem()
    block = params["blocks"][0]["attention"]
    block["output"]["kernel"] = jnp.eye(6, 8)
    head = head._replace(w_o=params["unembed"]["kernel"][:6])
    batch = Batch(inputs[None], targets(5)[None])
    arm = EM | {"order": order, "inner_steps": inner}
    # The product of two matrices does not move as one: only W_O may, here.
    of_head = em(
        m_steps.gradient(0.3),
        roles.by_role({("query", "key"): optax.sgd(0.1)}, still=("value", "output")),
        order=order,
        inner_steps=inner,
        frame_roles=("query", "key"),
        still=("output",),
    )
    loss_and_gradient, held = batched(ONE_HEAD)
    layered = SPECS["em"].layers(
        arm,
        RATES | {"output_rate": 0.0},
        LayeredModel(loss_and_gradient, held, steps=10),
    )
    mine, theirs = layered.init(params), of_head.init(head)
    for _ in range(4):
        mine, info = layered.step(mine, batch, jax.random.key(0))
        theirs, expected = of_head.step(theirs, batch, jax.random.key(0))
        assert relative_error(info.loss, expected.loss) < 1e-12
    found = mine.params["blocks"][0]["attention"]
    for name, weight in (
        ("query", theirs.params.w_q),
        ("key", theirs.params.w_k),
        ("value", theirs.params.w_v),
    ):
        assert relative_error(found[name]["kernel"], weight) < 1e-10
        assert relative_error(found[name]["kernel"], block[name]["kernel"]) > 1e-3


def test_the_rate_warms_up_and_cools_down():
    share = descent.warm_up_cosine(0.2, 100)
    found = np.array([share(n) for n in (0, 10, 20, 60, 100)])
    np.testing.assert_allclose(found, [0, 0.5, 1, 0.5, 0], atol=1e-6)
    assert descent.warm_up_cosine(0.0, 100)(0) == 1


def test_adamw_moves_at_its_rate_and_decays_weights():
    rates = {"learning_rate": 0.1, "weight_decay": 0.2}
    tx = specs.SCHEDULED["adamw"].build({"warm_up": 0.5}, rates, 4)
    params = {"w": jnp.array([2.0, -3.0])}
    slope = {"w": jnp.array([1.0, 5.0])}
    with jax.numpy_dtype_promotion("standard"):  # optax takes powers of a count
        updates, state = tx.update(slope, tx.init(params), params)
        np.testing.assert_array_equal(updates["w"], 0)  # the first rate is 0
        updates, _ = tx.update(slope, state, params)
    expected = -0.05 * (1 + 0.2 * np.asarray(params["w"]))
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("kind", "lstm", "one of transformer, mlp, history_mlp, gru"),
        ("norm", "layer", "one of none, pre, post"),
        ("positions", "sin", "one of none, learned, rotary, learned_rotary"),
        ("depth", -1, "a whole number, at least 0"),
        ("depth", 2.0, "a whole number, at least 0"),
        ("heads", 0, "a whole number, at least 1"),
        ("heads", 3, "a divisor of heads, 3"),
        ("kv_heads", 3, "a divisor of heads, 4"),
        ("d_head", 5, "an even number with rotary positions"),
        ("width", True, "a whole number, at least 1"),
        ("residual", 1, "true or false"),
        ("dropout_rate", 1.0, "a number from 0, below 1"),
        ("num_tokens", 0, "0 for tokens, and 1 or more"),
        ("d_x", 3, "0 for tokens, and 1 or more where num_tokens is 0"),
    ],
)
def test_an_architecture_that_is_none(field, value, allowed):
    message = rf"^{field}={value!r}: allowed: {allowed}"
    if (field, value) in (("heads", 3), ("num_tokens", 0)):  # then another is wrong
        message = rf"^(kv_heads=2|d_x=0): allowed: {allowed}"
    for built in (architecture, lambda **f: dataclasses.replace(architecture(), **f)):
        with pytest.raises(ValueError, match=message) as caught:
            built(**{field: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [-1, TOKENS, 99])
def test_a_token_that_is_none_makes_nan_of_what_looks_at_it(token):
    model = architecture()
    logit = forward(model, init(model), tokens(0).at[4].set(token)).logit
    wanted = forward(model, init(model), tokens(0)).logit
    np.testing.assert_array_equal(logit[:4], wanted[:4])
    assert np.isnan(logit[4:]).all()


def test_more_inputs_than_learned_positions():
    model = architecture(positions="learned")
    with pytest.raises(ValueError, match="of length 10: allowed: at most 9 positions"):
        transformer.apply(model, init(model), tokens(0, LENGTH + 1))
