"""`streaming.attend` and its taps against the same with every T x S array."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.extend.random import threefry2x32_p
from problems import central_difference, random_direction, relative_error

from jaxattn.kernels import streaming
from jaxattn.theory import laws


class Problem(NamedTuple):
    """One call of `attend`, options and all."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    upstream: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    options: dict


def random_problem(seed, dtype=np.float64, *, longest=70) -> Problem:
    """All options at random, sizes that fit no block among them."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def some(*choices):
        return choices[rng.integers(len(choices))]

    def cover():
        shape = [some(1, size) for size in (num_heads, length, sources)]
        return shape[some(0, 0, 0, 1) if shape[0] == 1 else 0 :]

    length, sources = rng.integers(1, longest, 2)
    sources = some(length, length, sources)
    num_heads, num_kv_heads = some((1, 1), (4, 4), (4, 2), (3, 1))
    options = {
        "causal": some(True, False),
        "window": some(None, None, 0, 5, (9, None), (None, 3), (20, 1), (9, -2)),
        "key_length": some(None, None, int(rng.integers(0, sources + 3))),
        "dropout_rate": some(0.0, 0.0, 0.4),
        "block_size": some(None, 1, 16, (8, 32), (32, 5)),
    }
    bias, mask = some(None, normal(*cover())), None
    if bias is not None and some(True, False):
        bias = jnp.where(rng.random(bias.shape) < 0.1, -jnp.inf, bias)
    if some(True, False):
        mask = jnp.asarray(rng.random(cover()) < some(0.2, 0.9))
    scale = some(0.1, 1.0, 5.0)
    return Problem(
        scale * normal(length, num_heads, 5),
        normal(sources, num_kv_heads, 5),
        normal(sources, num_kv_heads, 3),
        normal(length, num_heads, 3),
        bias,
        mask,
        options,
    )


def streamed(problem: Problem):
    """Contexts, gradients of query, key, value, bias, and the statistics."""
    options = dict(problem.options, mask=problem.mask)
    if options["dropout_rate"]:
        options["dropout_key"] = jax.random.key(5)
    num_heads = problem.query.shape[1]
    tap = streaming.zero_tap(len(problem.key), (num_heads,), problem.query.dtype)

    @jax.jit
    def run(query, key, value, bias, tap, upstream):
        def attend(query, key, value, bias, tap):
            return streaming.attend(query, key, value, bias=bias, tap=tap, **options)

        context, pull = jax.vjp(attend, query, key, value, bias, tap)
        return context, pull(upstream)

    context, (*gradients, statistics) = run(*problem[:3], problem.bias, tap, problem[3])
    return context, gradients, statistics


def three_axes(array):
    """(H, T, S), 1 long where the array has no axis; None as it is."""
    if array is None:
        return None
    return array.reshape((1,) * (3 - array.ndim) + array.shape)


def expected(problem: Problem):
    """The same, densely."""
    options = dict(problem.options)
    rate, _ = options.pop("dropout_rate"), options.pop("block_size")
    length, num_heads, _ = problem.query.shape
    shape = num_heads, length, len(problem.key)
    seen = dense.in_sight(*shape[1:], **options)[None]
    if problem.mask is not None:
        seen = seen & three_axes(problem.mask)
    keep = None
    if rate:
        with jax.enable_x64(False):
            keep = jax.random.bernoulli(jax.random.key(5), 1 - rate, shape)
        keep = jnp.where(keep, jnp.asarray(1 / (1 - rate), problem.query.dtype), 0)

    @jax.jit
    def run(query, key, value, bias, upstream):
        def attend(query, key, value, bias):
            return dense.attend(query, key, value, seen, three_axes(bias), keep)

        context, pull = jax.vjp(attend, query, key, value, bias)
        statistics = dense.statistics(
            query, key, value, upstream, seen, three_axes(bias), keep
        )
        return context, pull(upstream), statistics

    return run(*problem[:3], problem.bias, problem.upstream)


def check(problem: Problem, bound: float) -> None:
    """Every array and statistic by itself, relative to the whole of what it is of."""
    (context, gradients, statistics), wanted = streamed(problem), expected(problem)
    found = [context, *gradients, *statistics]
    wanted = [wanted[0], *wanted[1], *wanted[2]]
    names = [
        "context",
        "query",
        "key",
        "value",
        "bias",
        *streaming.LawStatistics._fields,
    ]
    for name, one, other in zip(names, found, wanted, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            size = np.linalg.norm(other)
            # Advantages are differences of terms of the size of u·v, about 1.
            floor = 0.0 if name in ("context", "value", "column_usage") else 1.0
            error = np.linalg.norm(one - other)
            assert error <= bound * max(size, floor), (name, error, problem.options)


@pytest.mark.parametrize("seed", range(6))
def test_equals_dense_attention_and_its_diagnostics(x64, seed):
    check(random_problem(seed), 1e-11)


@pytest.mark.parametrize("seed", [0, 4])
def test_equals_dense_attention_in_blocks_of_their_own_size(x64, seed):
    problem = random_problem(seed, longest=400)
    check(problem._replace(options=problem.options | {"block_size": None}), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 66))
def test_more_of_the_grid(x64, seed):
    check(random_problem(seed, longest=70 if seed % 4 else 400), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 25))
def test_more_of_the_grid_in_float32(seed):
    check(random_problem(seed, np.float32), 1e-5)


@pytest.mark.parametrize("shift", [-1e9, float(np.finfo(np.float32).min), 1e4])
def test_a_bias_that_moves_a_whole_row_far(shift):
    """As masks of padding are often written: the row must not lose its normaliser."""
    shape = (40, 40)
    row = jnp.where(np.arange(40)[:, None] % 3 == 0, np.float32(shift), 0)
    arrays = heads(0, *shape, dtype=np.float32)
    bias = jnp.broadcast_to(row, shape)[None]
    found = jax.jit(functools.partial(gradients, bias=bias))(*arrays)

    def attend(*arrays):
        return dense.attend(*arrays, np.ones((1, *shape), bool), bias)

    wanted = jax.vjp(attend, *arrays[:3])[1](arrays[3])
    # The shift has rounded the scores of its rows, in both alike.
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("seed", [3, 4])
def test_equals_dense_attention_and_its_diagnostics_in_float32(seed):
    check(random_problem(seed, np.float32), 1e-5)


def heads(seed, length, sources, *, num_heads=2, d_k=5, d_v=3, dtype=np.float64):
    """Query, key, value, upstream gradient, independent N(0, 1)."""
    rng = np.random.default_rng(seed)
    shapes = (length, d_k), (sources, d_k), (sources, d_v), (length, d_v)
    return [
        jnp.asarray(rng.normal(size=(size, num_heads, width)), dtype)
        for size, width in shapes
    ]


def gradients(query, key, value, upstream, **options):
    """Of <u, g> for query, key and value."""

    def total(query, key, value):
        return jnp.vdot(upstream, streaming.attend(query, key, value, **options))

    return jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value)


def test_central_differences_agree(x64):
    query, key, value, upstream = heads(0, 9, 12)

    def total(arrays):
        context = streaming.attend(*arrays, causal=True, window=6, block_size=4)
        return jnp.vdot(upstream, context)

    point = (query, key, value)
    direction = random_direction(1, point)
    slope = central_difference(jax.jit(total), point, direction)
    gradient = jax.jit(jax.grad(total))(point)
    assert abs(laws.loss_change(gradient, direction) / slope - 1) < 1e-8


def test_half_precision_is_summed_in_float32():
    half = [
        array.astype(jnp.bfloat16) for array in heads(0, 300, 300, dtype=np.float32)
    ]
    full = [array.astype(jnp.float32) for array in half]
    seen = dense.in_sight(300, 300, causal=True)[None]
    context = jax.jit(functools.partial(streaming.attend, causal=True))(*half[:3])
    assert context.dtype == jnp.bfloat16
    # One rounding at the end, half a unit in the last of 8 bits.
    wanted = dense.attend(*full[:3], seen)
    assert np.abs(context.astype(jnp.float32) / wanted - 1).max() < 2**-8
    found = gradients(*half, causal=True)
    _, pull = jax.vjp(lambda *arrays: dense.attend(*arrays, seen), *full[:3])
    for one, other in zip(found, pull(full[3]), strict=True):
        assert one.dtype == jnp.bfloat16
        assert relative_error(one.astype(jnp.float32), other) < 2**-8


@pytest.mark.parametrize("how", ["mask", "bias", "window", "key_length"])
def test_a_query_that_sees_nothing_gets_and_gives_nothing(x64, how):
    arrays = heads(0, 12, 10)
    blind = np.zeros(12, bool)
    blind[[0, 1]] = True  # where causal alone leaves them so: T is larger than S
    options = {"causal": True, "block_size": 4}
    if how == "mask":
        blind[5] = True
        options["mask"] = ~blind[:, None]
    elif how == "bias":
        blind[7] = True
        options["bias"] = jnp.where(blind, -jnp.inf, 0.0)[:, None]
    elif how == "window":
        blind[:4] = True
        options["window"] = (None, -2)
    else:
        blind[:] = True
        options["key_length"] = 0
    context = jax.jit(functools.partial(streaming.attend, **options))(*arrays[:3])
    assert (np.all(context == 0, axis=(1, 2)) == blind).all()
    found = gradients(*arrays, **options)
    assert all(np.isfinite(array).all() for array in found)
    assert (np.all(found[0] == 0, axis=(1, 2))[blind]).all()


def test_a_window_wider_than_everything_is_none():
    arrays = heads(0, 9, 12, dtype=np.float32)
    wanted = gradients(*arrays)
    for window in (21, 2**31 - 1, 2**70, (None, 2**31)):
        found = gradients(*arrays, window=window)
        assert relative_error(found, wanted) < 1e-6


def test_each_example_has_its_own_length(x64):
    arrays = heads(0, 9, 12)

    def run(key_length):
        return gradients(*arrays, key_length=key_length, causal=True, block_size=4)

    together = jax.jit(jax.vmap(run))(jnp.array([0, 5, 12, 40]))
    for number, length in enumerate((0, 5, 12, 40)):
        picked = jax.tree.map(lambda leaf, n=number: leaf[n], together)
        wanted = run(length)
        np.testing.assert_allclose(picked[0], wanted[0], atol=1e-14)
        np.testing.assert_allclose(picked[1], wanted[1], atol=1e-14)


def test_a_second_call_compiles_nothing():
    query, compiled = jnp.ones((9, 4)), []

    def listen(event, seconds, **kwargs):
        del seconds, kwargs
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    streaming.attend(query, query, query, causal=True)
    first = len(compiled)
    streaming.attend(query, query, query, causal=True)
    assert 0 < first == len(compiled)


def test_gradients_by_the_other_custom_vjp_of_jax():
    arrays = heads(0, 12, 12, dtype=np.float32)
    wanted = gradients(*arrays, causal=True, block_size=11)
    jax.config.update("jax_custom_vjp3", True)
    try:
        found = gradients(*arrays, causal=True, block_size=10)
    finally:
        jax.config.update("jax_custom_vjp3", False)
    assert relative_error(found, wanted) < 1e-6


def test_a_hessian_along_a_direction(x64):
    query, key, value, upstream = heads(0, 9, 9)
    direction = heads(1, 9, 9)[0]

    def slope(attend):
        def gradient(query):
            return jax.grad(lambda q: jnp.vdot(upstream, attend(q, key, value)))(query)

        return jax.jit(lambda q: jax.jvp(gradient, (q,), (direction,))[1])(query)

    seen = dense.in_sight(9, 9, causal=True)[None]
    found = slope(functools.partial(streaming.attend, causal=True, block_size=4))
    assert (
        relative_error(found, slope(functools.partial(dense.attend, seen=seen))) < 1e-12
    )


def test_a_nan_shows():
    query, key, value, _ = heads(0, 12, 12, dtype=np.float32)
    key = key.at[3, 0, 0].set(jnp.nan)
    context = streaming.attend(query, key, value, causal=True, block_size=4)
    bad = np.isnan(context).any(axis=2)
    assert bad[3:, 0].all()
    assert not bad[:3].any()
    assert not bad[:, 1].any()


UNUSED = {  # ways to say that of 40 sources the last 10 are not there
    "key_length": {"key_length": 30},
    "mask": {"mask": np.arange(40) < 30},
    "bias": {"bias": np.where(np.arange(40) < 30, 0, -np.inf).astype(np.float32)},
    "window": {"window": (None, -11)},
}


@pytest.mark.parametrize("block_size", [16, (8, 32), None])
@pytest.mark.parametrize("how", UNUSED)
def test_what_no_query_may_use_is_never_read(how, block_size):
    query, key, value, upstream = heads(0, 40, 40, dtype=np.float32)
    tap = streaming.zero_tap(40, (query.shape[1],))
    options = UNUSED[how] | {"block_size": block_size}

    @jax.jit
    def run(key, value):
        def total(query, key, value, tap):
            context = streaming.attend(query, key, value, tap=tap, **options)
            return jnp.vdot(upstream, context)

        return jax.value_and_grad(total, (0, 1, 2, 3))(query, key, value, tap)

    wanted = run(key, value)
    for number in (np.nan, np.inf):
        padded = run(key.at[30:].set(number), value.at[31:].set(number))
        for one, other in zip(*map(jax.tree.leaves, (padded, wanted)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("block_size", [10, 16, None])
def test_a_query_is_a_matter_of_what_it_sees_alone(block_size):
    query, key, value, upstream = heads(0, 40, 40, dtype=np.float32)
    spoilt = key.at[35].set(jnp.nan), value.at[30].set(jnp.inf)

    @jax.jit
    def run(query, key, value):
        def total(*arrays):
            context = streaming.attend(*arrays, causal=True, block_size=block_size)
            return jnp.vdot(upstream[:30], context[:30]), context

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(query, key, value)

    (_, context), gradient = run(query, *spoilt)
    (_, wanted), wanted_gradient = run(query, key, value)
    np.testing.assert_array_equal(context[:30], wanted[:30])
    assert np.isnan(context[30:]).all()
    # Nor do queries that the loss does not read spoil the gradients of others.
    padded = query.at[33:].set(jnp.nan)
    for found in (gradient, run(padded, key, value)[1], run(padded, *spoilt)[1]):
        for one, other in zip(found, wanted_gradient, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("block_size", [1, 5, None])
@pytest.mark.parametrize("spoilt", ["query", "upstream", "bias"])
def test_a_nan_shows_in_the_gradients_of_what_it_touches(spoilt, block_size):
    query, key, value, upstream = heads(0, 12, 12, dtype=np.float32)
    bias = jnp.zeros((12, 12))
    if spoilt == "query":
        query = query.at[5].set(jnp.nan)
    elif spoilt == "upstream":
        upstream = upstream.at[5].set(jnp.nan)
    else:  # a score that no number holds
        bias = bias.at[5, 2].set(jnp.inf)
    tap = streaming.zero_tap(12, (2,))

    def total(query, key, value, bias, tap):
        options = {"causal": True, "block_size": block_size}
        context = streaming.attend(query, key, value, bias=bias, tap=tap, **options)
        return jnp.vdot(upstream, context)

    of_query, of_key, of_value, of_bias, statistics = jax.jit(
        jax.grad(total, (0, 1, 2, 3, 4))
    )(query, key, value, bias, tap)
    seen = np.arange(12) <= 5
    for gradient, touched in (
        (of_query, np.arange(12) == 5),
        (of_key, seen),
        (of_value, seen),
    ):
        np.testing.assert_array_equal(np.isnan(gradient).any(axis=(1, 2)), touched)
    touched = (np.arange(12) == 5)[:, None] & seen
    np.testing.assert_array_equal(np.isnan(of_bias), touched)
    usage = np.isnan(statistics.column_usage).any(axis=0)
    np.testing.assert_array_equal(usage, seen)


def test_blind_queries_are_counted_whatever_they_are():
    query, key, value, upstream = heads(0, 12, 12, dtype=np.float32)
    tap = streaming.zero_tap(12, (2,))

    def blind(query, upstream):
        def total(tap):
            context = streaming.attend(query, key, value, window=(None, -3), tap=tap)
            return jnp.vdot(upstream, context)

        return jax.grad(total)(tap).blind_rows

    spoilt = query.at[1].set(jnp.nan)
    np.testing.assert_array_equal(blind(query, upstream), [3, 3])
    np.testing.assert_array_equal(blind(spoilt, upstream), [3, 3])
    np.testing.assert_array_equal(blind(spoilt, upstream.at[1].set(0)), [2, 2])


@pytest.mark.parametrize(
    ("key_length", "there"),
    [
        (np.uint32(2**32 - 1), 12),
        (np.int64(2**40), 12),
        (2**31, 12),
        (np.int8(5), 5),
        (np.uint64(5), 5),
        (-(2**40), 0),
    ],
)
def test_a_key_length_of_any_integer_type(key_length, there):
    query = jnp.zeros((1, 4))
    value = jnp.arange(1, 13, dtype=jnp.float32)[:, None]
    context = streaming.attend(
        query, jnp.zeros((12, 4)), value, key_length=key_length, block_size=5
    )
    assert context[0, 0] == pytest.approx((there + 1) / 2 if there else 0)


def equations(jaxpr) -> int:
    """How many there are, all the way down."""
    inside = sum(
        equations(inner)
        for equation in jaxpr.eqns
        for inner in jaxprs_in_params(equation.params)
    )
    return inside + len(jaxpr.eqns)


def gradient_equations(length, *, tapped=False, **options) -> int:
    shape = jax.ShapeDtypeStruct((length, 2, 16), np.float32)
    tap = streaming.zero_tap(length, (2,))

    def total(query, key, value, tap):
        return jnp.sum(streaming.attend(query, key, value, tap=tap, **options))

    asked = (0, 1, 2, 3) if tapped else (0, 1, 2)
    return equations(
        jax.make_jaxpr(jax.grad(total, asked))(shape, shape, shape, tap).jaxpr
    )


def test_the_program_is_as_long_at_any_length():
    sizes = {gradient_equations(n, causal=True) for n in (2_000, 20_000, 200_001)}
    assert len(sizes) == 1


def test_what_nobody_asks_for_is_not_computed():
    bias = np.zeros((1, 1, 2000), np.float32)
    plain = gradient_equations(2000, bias=bias)
    assert gradient_equations(2000, bias=bias, tapped=True) > plain + 20

    def total(query, bias):
        return jnp.sum(streaming.attend(query, query, query, bias=bias))

    query = np.zeros((2000, 2, 16), np.float32)
    both, one = (
        equations(jax.make_jaxpr(jax.grad(total, asked))(query, bias).jaxpr)
        for asked in ((0, 1), 0)
    )
    assert both > one


def visits(length, sources, rows, columns, low, high) -> np.ndarray:
    """How often each pair is worked on: (T, S)."""
    plan = streaming._Plan(rows, columns, low, high, 0.0, None)
    side = streaming._Side(None, None, None)

    def step(tile, seen):
        patch = jax.lax.dynamic_slice(seen, (tile.query, tile.source), (rows, columns))
        return jax.lax.dynamic_update_slice(seen, patch + 1, (tile.query, tile.source))

    def block(seen, first, new):
        return streaming._over_sources(plan, step, seen, first, sources, side)

    return np.asarray(
        streaming._over_queries(
            plan, block, jnp.zeros((length, sources), np.int32), length
        )
    )


def test_causal_work_is_the_lower_triangle():
    seen = visits(64, 64, 8, 8, None, 0)
    np.testing.assert_array_equal(seen, np.kron(np.tri(8), np.ones((8, 8))))


def test_a_window_is_worked_on_alone():
    seen = visits(64, 64, 8, 8, -8, 0)
    np.testing.assert_array_equal(
        seen, np.kron(np.tri(8) - np.tri(8, k=-2), np.ones((8, 8)))
    )


def test_memory_grows_with_the_length_and_not_with_its_square():
    def bytes_at(length):
        shape = jax.ShapeDtypeStruct((length, 64), np.float32)

        def total(query, key, value):
            return jnp.sum(streaming.attend(query, key, value, causal=True) ** 2)

        program = jax.jit(jax.grad(total, (0, 1, 2))).lower(shape, shape, shape)
        return program.compile().memory_analysis().temp_size_in_bytes

    length = 65_536
    assert bytes_at(length) < 16 * length * 64 * 4


_AT_65536 = """
import jax, jax.numpy as jnp
from pathlib import Path
from jaxattn import streaming
arrays = [jax.random.normal(jax.random.key(n), (65_536, 64)) for n in range(4)]
@jax.jit
def gradient(query, key, value, upstream):
    def total(query, key, value, tap):
        return jnp.vdot(upstream, streaming.attend(query, key, value, tap=tap))
    tap = streaming.zero_tap(65_536)
    return jax.grad(total, (0, 1, 2, 3))(query, key, value, tap)
*_, tap = jax.block_until_ready(gradient(*arrays))
assert abs(tap.column_usage.sum() / 65_536 - 1) < 1e-4
lines = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_a_process_with_65536_positions_stays_below_a_gibibyte():
    # Not ru_maxrss: that begins at what the process that started this one held.
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory of one process: known on Linux only")
    command = [sys.executable, "-c", _AT_65536]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**20  # kilobytes


# --- taps, wherever they run


def tapped(query, key, value, upstream, tap, **options):
    """Gradient of <u, g> for query and tap."""

    def total(query, tap):
        context = streaming.attend(query, key, value, tap=tap, **options)
        return jnp.vdot(upstream, context)

    return jax.grad(total, (0, 1))(query, tap)


def two_examples(length, dtype=np.float64):
    """What `heads` gives, of two seeds, one upon the other."""
    both = (heads(seed, length, length, dtype=dtype) for seed in range(2))
    return [jnp.stack(pair) for pair in zip(*both, strict=True)]


def test_taps_under_vmap_are_each_example_s_own(x64):
    arrays = two_examples(9)
    tap = streaming.zero_tap(9, (2, 2), np.float64)
    run = functools.partial(tapped, causal=True)
    together = jax.jit(jax.vmap(run))(*arrays, tap)
    apart = [
        jax.jit(run)(*jax.tree.map(lambda leaf, n=n: leaf[n], (*arrays, tap)))
        for n in range(2)
    ]
    apart = jax.tree.map(lambda *leaves: jnp.stack(leaves), *apart)
    assert relative_error(together, apart) < 1e-14


@pytest.mark.parametrize("large", [False, True])
def test_vmap_gives_what_single_calls_give(large):
    length = 300 if large else 20  # a loop on CPU, or side by side
    arrays = two_examples(length, np.float32)
    query, *others = arrays
    run = functools.partial(gradients, causal=True)
    together = jax.vmap(run, in_axes=(0, None, None, None))(
        query, *(o[0] for o in others)
    )
    for n in range(2):
        alone = run(query[n], *(other[0] for other in others))
        picked = jax.tree.map(lambda leaf, n=n: leaf[n], together)
        assert relative_error(picked, alone) < 1e-6


def test_taps_under_scan_and_remat_are_each_layer_s_own(x64):
    query, key, value, upstream = heads(0, 9, 9, d_k=3)

    def layer(context, tap):
        return jnp.tanh(streaming.attend(context, key, value, tap=tap)), None

    def total(taps, wrap):
        context, _ = jax.lax.scan(wrap(layer), query, taps)
        return jnp.vdot(upstream, context)

    taps = streaming.zero_tap(9, (3, 2), np.float64)  # three layers, two heads
    scanned = jax.jit(jax.grad(functools.partial(total, wrap=lambda f: f)))(taps)
    again = jax.jit(jax.grad(functools.partial(total, wrap=jax.checkpoint)))(taps)
    assert relative_error(again, scanned) < 1e-14

    def unrolled(taps):
        context = query
        for n in range(3):
            tap = jax.tree.map(lambda leaf, n=n: leaf[n], taps)
            context, _ = layer(context, tap)
        return jnp.vdot(upstream, context)

    assert relative_error(jax.jit(jax.grad(unrolled))(taps), scanned) < 1e-13
    assert len(set(np.asarray(scanned.routing_entropy).ravel().tolist())) == 6


def test_a_tap_changes_nothing_else(x64):
    arrays = heads(0, 20, 20)
    tap = streaming.zero_tap(20, (2,), np.float64)
    run = jax.jit(functools.partial(tapped, causal=True))
    np.testing.assert_array_equal(run(*arrays, tap)[0], run(*arrays, None)[0])


# --- dropout


def test_dropout_does_not_depend_on_the_blocks():
    arrays = heads(0, 50, 70, dtype=np.float32)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(1)}
    results = [
        gradients(*arrays, block_size=size, **options) for size in (None, (7, 64))
    ]
    for other in results[1:]:
        assert relative_error(other, results[0]) < 1e-5


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "raw"])
def test_dropout_takes_any_key(kind):
    key = jax.random.PRNGKey(0) if kind == "raw" else jax.random.key(0, impl=kind)
    query = jnp.zeros((40, 2, 4))  # attention is uniform: contexts are means of c_ij
    value = jnp.ones((50, 2, 1))
    context = streaming.attend(
        query, jnp.zeros((50, 2, 4)), value, dropout_rate=0.25, dropout_key=key
    )
    kept = 0.75 * np.asarray(context) * 50
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    # 4000 draws, standard deviation of their share 0.0068.
    assert abs(kept.sum() / 4000 - 0.75) < 4 * 0.0068
    assert not np.array_equal(kept[:, 0], kept[:, 1])


def test_dropout_counts_beyond_32_bits():
    words = np.uint64(70_001) * np.uint64(2**20 - 3)
    high, low = streaming._multiply(jnp.full(1, 70_001, np.uint32), 2**20 - 3)
    assert (int(high[0]) << 32) + int(low[0]) == int(words)


def test_slots_of_dropout_never_repeat():
    """Where slot times T passes 2^32 the mask goes on as that of a larger array."""
    length, sources, rate = 16, 9, 0.5
    slots = [0, 2**28, 2**32 - 1, 3 * 2**28]
    options = {
        "dropout_rate": rate,
        "dropout_key": jax.random.key(3),
        "dropout_slot": np.array(slots),
    }
    zeros, eye = jnp.zeros((length, 4, 2)), jnp.eye(sources)
    contexts = streaming.attend(
        zeros,
        jnp.zeros((sources, 4, 2)),
        jnp.broadcast_to(eye[:, None], (sources, 4, sources)),
        **options,
    )
    words = jax.random.key_data(options["dropout_key"])
    for head, slot in enumerate(slots):
        first = slot * length * sources
        places = [(first + n) % 2**64 for n in range(length * sources)]
        high = np.array([place >> 32 for place in places], np.uint32)
        low = np.array([place & 0xFFFFFFFF for place in places], np.uint32)
        key = [jnp.full(len(places), word) for word in words]
        bits = np.bitwise_xor(*map(np.asarray, threefry2x32_p.bind(*key, high, low)))
        kept = (bits >> 9) * 2.0**-23 < 1 - rate
        np.testing.assert_array_equal(
            contexts[:, head] > 0, kept.reshape(length, sources)
        )


# --- bad input


def shaped(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ([(9, 2, 4), (9, 4), (9, 2, 4)], {}, r"allowed: \(T, H, d\), or \(T, d\)"),
        ([(9, 2, 4), (9, 2, 5), (9, 2, 4)], {}, "query as wide as key"),
        ([(9, 2, 4), (9, 2, 4), (8, 2, 4)], {}, "key as long as value"),
        ([(9, 3, 4), (9, 2, 4), (9, 2, 4)], {}, "a multiple of the key's heads"),
        ([(9, 2, 4), (0, 2, 4), (0, 2, 4)], {}, "no empty axis"),
        ([(9, 0, 4), (9, 0, 4), (9, 0, 4)], {}, "no empty axis"),
        (
            None,
            {
                "dropout_rate": 0.5,
                "dropout_key": jax.random.key(0),
                "dropout_slot": np.array([0, 2**32]),
            },
            "dropout_slot=.*: allowed: whole numbers from 0, below",
        ),
        (None, {"mask": shaped(9, 9)}, "mask of float32: allowed: bool"),
        (None, {"mask": shaped(9, 8, dtype=bool)}, r"mask \(9, 8\): allowed: what"),
        (None, {"bias": shaped(9, 9, dtype=int)}, "bias of int32: allowed: floating"),
        (None, {"bias": shaped(1, 2, 9, 9)}, r"bias \(1, 2, 9, 9\): allowed: what"),
        (None, {"window": -1}, "window=-1: allowed: one that is not empty"),
        (None, {"window": (1, -2)}, r"window=\(1, -2\): allowed: one that is not"),
        (None, {"window": (-1, 3), "causal": True}, "allowed: one that is not empty"),
        (None, {"window": 2.5}, "window=2.5: allowed: whole numbers, or None"),
        (None, {"window": (1, 2, 3)}, r"window=\(1, 2, 3\): allowed: whole .* or two"),
        (None, {"block_size": (4.0, 4)}, r"block_size=\(4.0, 4\): allowed: whole"),
        (None, {"key_length": 2.7}, "key_length=2.7: allowed: a whole number"),
        (None, {"key_length": np.array([2, 3])}, "key_length=.*: allowed: a whole"),
        (None, {"block_size": 0}, "block_size=0: allowed"),
        (None, {"dropout_rate": 1.0}, "dropout_rate=1.0: allowed: 0 <= rate < 1"),
        (
            None,
            {"dropout_rate": 0.5},
            "dropout_key=None with a rate of 0.5: allowed: a key",
        ),
        (
            None,
            {"tap": streaming.zero_tap(9)},
            r"tap.*of \(\): allowed: zero_tap\(9, \(2,\)\)",
        ),
        (None, {"tap": streaming.zero_tap(8, (2,))}, r"tap.column_usage of \(2, 8\)"),
        (None, {"tap": {}}, "tap of dict: allowed: zero_tap"),
    ],
)
def test_bad_input(arrays, options, message):
    arrays = arrays or [(9, 2, 4), (9, 2, 4), (9, 2, 4)]
    with pytest.raises(ValueError, match=message):
        streaming.attend(*(shaped(*shape) for shape in arrays), **options)


@pytest.mark.parametrize("sizes", [(0, (2,)), (9, (2, 0)), (2.5, ()), (True, ())])
def test_a_tap_of_no_size(sizes):
    with pytest.raises(ValueError, match="allowed: a whole number, at least 1"):
        streaming.zero_tap(*sizes)


def test_one_floating_point_type():
    query = shaped(9, 4)
    with pytest.raises(
        ValueError, match=r"dtypes \['float32', 'int32'\]: allowed: one"
    ):
        streaming.attend(query, query, query.astype(np.int32))


def test_forward_mode_is_refused():
    query = shaped(9, 4)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: streaming.attend(q, q, q), (query,), (query,))
