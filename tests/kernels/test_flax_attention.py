"""The drop-in against the stock functions, inside the layers of flax.nnx and linen."""

import functools
import importlib.util
from pathlib import Path

import dense
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxattn.kernels import flax_attention, streaming

INPUTS = np.random.default_rng(0).normal(size=(3, 7, 8)).astype(np.float32)
OF_EXAMPLES = np.random.default_rng(1).random((3, 1, 7, 7)) < 0.6
OF_HEADS = np.random.default_rng(2).random((1, 4, 7, 7)) < 0.6
# No fully masked row: there the stock function does otherwise.
OF_EXAMPLES[..., 0] = OF_HEADS[..., 0] = True

MASKS = {
    "causal": np.tri(7, dtype=bool)[None, None],
    "of each example": OF_EXAMPLES,
    "of each head": OF_HEADS,
    "of numbers": OF_EXAMPLES.astype(np.float32),
}
LAYERS = {
    "plain": {},
    "dropout": {"dropout_rate": 0.4},
    "unshared dropout": {"dropout_rate": 0.4, "broadcast_dropout": False},
}


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


def close(ours, stock):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        jax.tree.leaves(ours),
        jax.tree.leaves(stock),
    )


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # the stock function's own arithmetic
        yield


def nnx_layer(attention_fn, **options):
    return nnx.MultiHeadAttention(
        num_heads=4,
        in_features=8,
        decode=False,
        deterministic=False,
        attention_fn=attention_fn,
        rngs=nnx.Rngs(0, dropout=3),
        **options,
    )


def nnx_run(layer, wanted=nnx.Param, **call):
    @nnx.jit
    def run(layer):
        def loss(layer):
            output = layer(INPUTS, **call)
            return jnp.sum(jnp.sin(output)), output

        argnums = nnx.DiffState(0, wanted)
        gradient, output = nnx.grad(loss, argnums=argnums, has_aux=True)(layer)
        return output, gradient

    return run(layer)


@pytest.mark.parametrize("mask", ["of each head", slow("of each example")])
@pytest.mark.parametrize("kind", LAYERS)
def test_in_an_nnx_layer(kind, mask):
    call = {"mask": MASKS[mask]}
    stock = nnx_run(nnx_layer(nnx.dot_product_attention, **LAYERS[kind]), **call)
    ours = nnx_layer(flax_attention.dot_product_attention, **LAYERS[kind])
    close(nnx_run(ours, **call), stock)


@pytest.mark.parametrize("mask", ["of each head", slow("causal")])
def test_grouped_queries_and_is_causal(mask):
    options, call = {"num_kv_heads": 2}, {"mask": MASKS[mask], "is_causal": True}
    stock = nnx_run(nnx_layer(nnx.dot_product_attention, **options), **call)
    ours = nnx_layer(flax_attention.dot_product_attention, **options)
    close(nnx_run(ours, **call), stock)


def linen_run(attention_fn, mask, **options):
    layer = linen.MultiHeadDotProductAttention(
        num_heads=4, deterministic=False, attention_fn=attention_fn, **options
    )
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    plain = linen.MultiHeadDotProductAttention(num_heads=4)

    def loss(params):
        rngs = {"dropout": jax.random.key(1)}
        output = layer.apply(params, INPUTS, mask=mask, rngs=rngs)
        return jnp.sum(jnp.sin(output)), output

    @jax.jit
    def run():
        return jax.grad(loss, has_aux=True)(plain.init(keys, INPUTS))

    gradient, output = run()
    return output, gradient


@pytest.mark.parametrize("mask", ["of numbers", slow("causal")])
@pytest.mark.parametrize("kind", ["plain", slow("dropout"), slow("unshared dropout")])
def test_in_a_linen_layer(kind, mask):
    stock, ours = (
        linen_run(function, MASKS[mask], **LAYERS[kind])
        for function in (
            linen.dot_product_attention,
            flax_attention.dot_product_attention,
        )
    )
    close(ours, stock)


@pytest.mark.parametrize("shape", [(7, 5), (3, 1, 1, 5), slow((1, 4, 7, 5))])
def test_a_bias_of_any_shape(shape):
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(3, size, 4, 6)).astype(np.float32) for size in (7, 5, 5)
    )
    bias = rng.normal(size=shape).astype(np.float32)

    def run(function, bias):
        def loss(query, key, value, bias):
            return jnp.sum(jnp.sin(function(query, key, value, bias)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(query, key, value, bias)

    def stock(query, key, value, bias):
        # The stock function wants all axes.
        bias = jnp.broadcast_to(bias, (3, 4, 7, 5))
        return nnx.dot_product_attention(query, key, value, bias)

    close(run(flax_attention.dot_product_attention, bias), run(stock, bias))


@pytest.mark.parametrize("lengths", [(7, 5), (5, 7)])
def test_is_causal_counts_from_the_first_of_each(lengths):
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(3, n, 4, 6)).astype(np.float32) for n in lengths)

    def run(function):
        def loss(query, key):
            context = function(query, key, key, is_causal=True)
            return jnp.sum(jnp.sin(context)), context

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(query, key)

    close(run(flax_attention.dot_product_attention), run(nnx.dot_product_attention))


@pytest.mark.parametrize("examples", [(), (2, 3)])
def test_any_number_of_axes_of_examples(examples):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(*examples, 7, 4, 6)).astype(np.float32)
    mask = np.tri(7, dtype=bool)
    ours = np.asarray(
        jax.jit(flax_attention.dot_product_attention)(query, query, query, mask=mask)
    )
    assert ours.shape == query.shape
    flat = query.reshape(-1, 7, 4, 6)
    stock = jax.jit(nnx.dot_product_attention)(flat, flat, flat, mask=mask[None, None])
    close(ours.reshape(stock.shape), stock)


def test_a_tapped_layer_gives_the_same_and_statistics_of_every_head():
    plain = nnx_run(nnx_layer(nnx.dot_product_attention), is_causal=True)
    layer = nnx_layer(flax_attention.TappedAttention(7, (3, 4)))
    wanted = nnx.Any(nnx.Param, flax_attention.Tap)
    output, gradient = nnx_run(layer, wanted, is_causal=True)
    params, taps = nnx.split_state(gradient, nnx.Param, flax_attention.Tap)
    close((output, params), plain)
    (statistics,) = jax.tree.leaves(
        taps, is_leaf=lambda leaf: isinstance(leaf, streaming.LawStatistics)
    )

    @nnx.jit
    def expected(layer, output):
        query, key, value = (
            getattr(layer, name)(INPUTS) for name in ("query", "key", "value")
        )
        upstream = jnp.einsum("ntf,hdf->nthd", jnp.cos(output), layer.out.kernel[...])
        mask = dense.band_mask(7, 7, causal=True)
        of_example = functools.partial(dense.statistics, mask=mask)
        return jax.vmap(of_example)(query, key, value, upstream)

    for one, other in zip(statistics, expected(layer, output), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_tapped_layer_works_without_its_tap():
    layer = nnx_layer(flax_attention.TappedAttention(7, (3, 4)))
    with pytest.raises(ValueError, match=r"must be zero_tap\(7, \(2, 4\)\)"):
        layer(INPUTS[:2])
    layer.attention_fn = flax_attention.dot_product_attention
    assert layer(INPUTS[:2]).shape == INPUTS[:2].shape


def test_taps_in_a_linen_layer():
    def loss(tap):
        attention_fn = functools.partial(flax_attention.dot_product_attention, tap=tap)
        return jnp.sum(jnp.sin(linen_output(attention_fn)))

    found = jax.jit(jax.grad(loss))(streaming.zero_tap(7, (3, 4)))
    np.testing.assert_allclose(np.sum(found.column_usage, axis=2), 7, rtol=1e-5)
    assert (found.routing_pressure > 0).all()
    # Linen hands a mask over only to a function that has it in its signature.
    outputs = (
        jax.jit(functools.partial(linen_output, attention_fn))()
        for attention_fn in (
            flax_attention.TappedAttention(7, (3, 4)),
            linen.dot_product_attention,
        )
    )
    close(*outputs)


def linen_output(attention_fn):
    layer = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn)
    params = linen.MultiHeadDotProductAttention(num_heads=4).init(
        jax.random.key(0), INPUTS
    )
    return layer.apply(params, INPUTS, mask=MASKS["causal"])


def test_the_example_learns_and_every_step_has_every_head():
    path = Path(__file__).parents[2] / "scripts" / "tapped_transformer.py"
    spec = importlib.util.spec_from_file_location("tapped_transformer", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    losses = []
    for number in range(30):
        loss, statistics = example.step(model, optimizer, jax.random.key(number))
        losses.append(float(loss))
        assert len(statistics) == example.LAYERS
        for layer in statistics:
            usage = np.asarray(layer.column_usage)
            assert usage.shape == (example.EXAMPLES, example.HEADS, example.LENGTH)
            np.testing.assert_allclose(usage.sum(axis=2), example.LENGTH, rtol=1e-4)
            assert (np.asarray(layer.routing_pressure) > 0).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": object()}, "module=object: must be None; use a tap"),
        (
            {"promote_dtype": len},
            "promote_dtype=builtin_function_or_method: must be None",
        ),
        ({"einsum_dot_general": len}, "einsum_dot_general="),
        ({"qk_attn_weights_einsum": len}, "qk_attn_weights_einsum="),
        ({"attn_weights_value_einsum": len}, "attn_weights_value_einsum="),
        (
            {"dropout_rate": 0.5},
            "dropout_rng=None: must be a random key, as dropout_rate=0.5",
        ),
        ({"mask": np.ones((2, 7, 7), bool)}, r"mask \(2, 7, 7\): must broadcast"),
        ({"bias": np.ones((1, 3, 1, 7, 7))}, r"bias \(1, 3, 1, 7, 7\): must broad"),
        ({"tap": streaming.zero_tap(7, (4,))}, r"must be zero_tap\(7, \(3, 4\)\)"),
    ],
)
def test_options_that_are_refused(options, message):
    query = np.zeros((3, 7, 4, 6), np.float32)
    with pytest.raises(ValueError, match=message):
        flax_attention.dot_product_attention(query, query, query, **options)


def test_weights_cannot_be_sown():
    layer = nnx_layer(flax_attention.dot_product_attention)
    with pytest.raises(ValueError, match="module=MultiHeadAttention: must be None"):
        layer(INPUTS, sow_weights=True)


def test_shapes_of_examples_must_agree():
    query = np.zeros((3, 7, 4, 6), np.float32)
    with pytest.raises(ValueError, match=r"must be \(..., length, heads, width\)"):
        flax_attention.dot_product_attention(query, query[:2], query[:2])


def test_an_unknown_option_is_an_error():
    query = np.zeros((3, 7, 4, 6), np.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window_size'"):
        flax_attention.dot_product_attention(query, query, query, window_size=3)


@pytest.mark.parametrize("sizes", [(0, (2, 4)), (-1, (2, 4)), (9, (0, 4))])
def test_a_tapped_layer_of_no_size(sizes):
    with pytest.raises(ValueError, match="must be an integer, at least 1"):
        flax_attention.TappedAttention(*sizes)
