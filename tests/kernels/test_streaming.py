"""`streaming.attend` and its taps against dense attention."""

import functools
import os
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
from problems import central_difference, random_direction, relative_error

from jaxattn.kernels import streaming


class Problem(NamedTuple):
    """One call of `attend` with its options."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    upstream: np.ndarray
    bias: np.ndarray | None
    mask: np.ndarray | None
    options: dict


def random_problem(seed, dtype=np.float64, *, longest=70) -> Problem:
    """All options at random, sizes that are no multiple of a block among them."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

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
        bias[rng.random(bias.shape) < 0.1] = -np.inf
    if some(True, False):
        mask = rng.random(cover()) < some(0.2, 0.9)
    scale = some(0.1, 1.0, 5.0)
    return Problem(
        normal(length, num_heads, 5) * dtype(scale),
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
    mask = dense.band_mask(*shape[1:], **options)[None]
    if problem.mask is not None:
        mask = mask & three_axes(problem.mask)
    factors = None
    if rate:
        with jax.enable_x64(False):
            keep = jax.random.bernoulli(jax.random.key(5), 1 - rate, shape)
        factors = np.where(keep, 1 / (1 - rate), 0).astype(problem.query.dtype)

    @jax.jit
    def run(query, key, value, bias, upstream):
        def attend(query, key, value, bias):
            return dense.attend(query, key, value, mask, three_axes(bias), factors)

        context, pull = jax.vjp(attend, query, key, value, bias)
        statistics = dense.statistics(
            query, key, value, upstream, mask, three_axes(bias), factors
        )
        return context, pull(upstream), statistics

    return run(*problem[:3], problem.bias, problem.upstream)


def check(problem: Problem, bound: float) -> None:
    """Compares every array and statistic, each relative to its norm."""
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


# Together these have every option, with grouped heads, and with and without blocks.
@pytest.mark.parametrize("seed", [1, 4, 5, 18, 24])
def test_equals_dense_attention_and_its_statistics(x64, seed):
    check(random_problem(seed), 1e-11)


def test_equals_dense_attention_in_blocks_of_the_default_size(x64):
    problem = random_problem(13, longest=400)
    assert min(len(problem.query), len(problem.key)) > 256
    check(problem._replace(options=problem.options | {"block_size": None}), 1e-11)


@pytest.mark.parametrize("seed", [2])
def test_equals_dense_attention_in_float32(seed):
    check(random_problem(seed, np.float32), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 66))
def test_more_of_the_grid(x64, seed):
    check(random_problem(seed, longest=70 if seed % 4 else 400), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 25))
def test_more_of_the_grid_in_float32(seed):
    check(random_problem(seed, np.float32), 1e-5)


def streamed_pull(**options):
    """Contexts and gradients of `attend` with these options, compiled."""
    attend = functools.partial(streaming.attend, **options)
    return jax.jit(functools.partial(dense.pulled, attend))


def dense_pull(mask):
    """The same of dense attention."""
    return jax.jit(
        functools.partial(dense.pulled, functools.partial(dense.attend, mask=mask))
    )


def test_a_bias_that_moves_a_whole_row_far():
    """As masks of padding are often written: the row must not lose its normaliser."""

    def run(attend, arrays, bias):
        return dense.pulled(functools.partial(attend, bias=bias), *arrays)

    mask = np.ones((1, 40, 40), bool)
    found = jax.jit(functools.partial(run, streaming.attend))
    wanted = jax.jit(functools.partial(run, functools.partial(dense.attend, mask=mask)))
    arrays = dense.heads(0, 40, 40, dtype=np.float32)
    for shift in (-1e9, np.finfo(np.float32).min, 1e4):
        row = np.where(np.arange(40)[:, None] % 3 == 0, np.float32(shift), 0)
        bias = np.broadcast_to(row, (1, 40, 40))
        # The shift has rounded the scores of its rows, in both alike.
        error = relative_error(found(arrays, bias), wanted(arrays, bias))
        assert error < 1e-5, shift


def test_central_differences_agree(x64):
    query, key, value, upstream = dense.heads(0, 9, 12)

    @jax.jit
    @jax.value_and_grad
    def total(arrays):
        context = streaming.attend(*arrays, causal=True, window=6, block_size=4)
        return jnp.vdot(upstream, context)

    point = (query, key, value)
    direction = jax.tree.map(np.asarray, random_direction(1, point))
    slope = central_difference(lambda arrays: total(arrays)[0], point, direction)
    gradient = total(point)[1]
    change = sum(np.vdot(g, d) for g, d in zip(gradient, direction, strict=True))
    assert abs(change / slope - 1) < 1e-8


def test_half_precision_is_summed_in_float32():
    half = [
        array.astype(jnp.bfloat16)
        for array in dense.heads(0, 300, 300, dtype=np.float32)
    ]
    full = [array.astype(np.float32) for array in half]
    context, gradients = streamed_pull(causal=True)(*half)
    wanted, dense_gradients = dense_pull(dense.band_mask(300, 300, causal=True))(*full)
    assert context.dtype == jnp.bfloat16
    # One rounding at the end, half a unit in the last of 8 bits.
    context = np.asarray(context.astype(jnp.float32))
    assert np.abs(context / np.asarray(wanted) - 1).max() < 2**-8
    for one, other in zip(gradients, dense_gradients, strict=True):
        assert one.dtype == jnp.bfloat16
        assert relative_error(one.astype(jnp.float32), other) < 2**-8


def test_a_window_wider_than_all_sources_is_none():
    arrays = dense.heads(0, 9, 12, dtype=np.float32)[:3]

    def program(window):
        attend = functools.partial(streaming.attend, window=window)
        return str(jax.make_jaxpr(attend)(*arrays))

    wanted = program(None)
    for window in (21, 2**31 - 1, 2**70, (None, 2**31)):
        assert program(window) == wanted
    assert program(20) != wanted


def test_each_example_has_its_own_length(x64):
    arrays = dense.heads(0, 9, 12)

    @jax.jit
    @jax.vmap
    def run(key_length):
        attend = functools.partial(
            streaming.attend, key_length=key_length, causal=True, block_size=4
        )
        return dense.pulled(attend, *arrays)

    @jax.jit
    def alone(mask):
        return dense.pulled(functools.partial(dense.attend, mask=mask), *arrays)

    lengths = np.array([0, 5, 12, 40])
    together = jax.tree.leaves(jax.tree.map(np.asarray, run(lengths)))
    for number, length in enumerate(lengths):
        mask = dense.band_mask(9, 12, causal=True, key_length=length)
        for one, other in zip(together, jax.tree.leaves(alone(mask)), strict=True):
            np.testing.assert_allclose(one[number], other, atol=1e-13)


def test_a_second_call_compiles_nothing():
    query, compiled = jnp.ones((11, 6)), []  # a shape of no other test

    def listen(event, _seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        streaming.attend(query, query, query, causal=True)
        first = len(compiled)
        streaming.attend(query, query, query, causal=True)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 0 < first == len(compiled)


def test_gradients_by_the_other_custom_vjp_of_jax():
    arrays = dense.heads(0, 12, 12, dtype=np.float32)
    wanted = dense_pull(dense.band_mask(12, 12, causal=True))(*arrays)
    jax.config.update("jax_custom_vjp3", True)
    try:
        found = streamed_pull(causal=True, block_size=10)(*arrays)
    finally:
        jax.config.update("jax_custom_vjp3", False)
    assert relative_error(found, wanted) < 1e-6


def test_a_hessian_along_a_direction(x64):
    query, key, value, upstream = dense.heads(0, 9, 9)
    direction = dense.heads(1, 9, 9)[0]

    def slope(attend):
        def gradient(query):
            return jax.grad(lambda q: jnp.vdot(upstream, attend(q, key, value)))(query)

        return jax.jit(lambda q: jax.jvp(gradient, (q,), (direction,))[1])(query)

    mask = dense.band_mask(9, 9, causal=True)
    found = slope(functools.partial(streaming.attend, causal=True, block_size=4))
    wanted = slope(functools.partial(dense.attend, mask=mask))
    assert relative_error(found, wanted) < 1e-12


# --- size of the program


def equations(jaxpr) -> int:
    """Number of equations, those of inner programs included."""
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

    argnums = (0, 1, 2, 3) if tapped else (0, 1, 2)
    return equations(
        jax.make_jaxpr(jax.grad(total, argnums))(shape, shape, shape, tap).jaxpr
    )


def test_the_program_is_as_long_at_any_length():
    sizes = {gradient_equations(n, causal=True) for n in (2_000, 200_001)}
    assert len(sizes) == 1


def test_only_requested_gradients_are_computed():
    bias = np.zeros((1, 1, 2000), np.float32)
    plain = gradient_equations(2000, bias=bias)
    assert gradient_equations(2000, bias=bias, tapped=True) > plain + 20

    def total(query, bias):
        return jnp.sum(streaming.attend(query, query, query, bias=bias))

    query = np.zeros((2000, 2, 16), np.float32)
    both, one = (
        equations(jax.make_jaxpr(jax.grad(total, argnums))(query, bias).jaxpr)
        for argnums in ((0, 1), 0)
    )
    assert both > one


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
    # Not ru_maxrss: that begins at the peak of the process that started this one.
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory of one process: known on Linux only")
    command = [sys.executable, "-c", _AT_65536]
    optimized = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        command, env=optimized, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2**20  # kilobytes


def test_forward_mode_is_refused():
    query = np.zeros((9, 4), np.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: streaming.attend(q, q, q), (query,), (query,))
