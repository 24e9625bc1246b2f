"""`streaming.attend` on several devices, against dense attention on one."""

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxattn.kernels import streaming

LENGTH, HEADS, KV_HEADS, DEVICES = 140, 8, 4, 4
HEAD = PartitionSpec(None, "device")
EXAMPLE = PartitionSpec("device")

# Blocks so large that heads are a loop: see `heads.one_by_one`.
attend = functools.partial(streaming.attend, causal=True, block_size=128)
MASK = dense.band_mask(LENGTH, LENGTH, causal=True)
dense_attend = functools.partial(dense.attend, mask=MASK)


def arrays(*leading):
    rng = np.random.default_rng(0)

    def normal(heads):
        return rng.normal(size=(*leading, LENGTH, heads, 8)).astype(np.float32)

    return normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)


def mesh(kind):
    return jax.make_mesh((DEVICES,), ("device",), axis_types=(kind,))


def value_and_gradients(function, *inputs):
    def total(*inputs):
        context = function(*inputs)
        return jnp.sum(jnp.sin(context)), context

    run = jax.value_and_grad(total, tuple(range(len(inputs))), has_aux=True)
    return jax.jit(run)(*inputs)


def assert_same(found, wanted):
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.fixture(scope="module")
def of_heads():
    """Value and gradients of one example, dense."""
    return value_and_gradients(dense_attend, *arrays())


def test_heads_inside_shard_map_and_their_statistics(of_heads):
    def tapped(query, key, value, tap):
        return attend(query, key, value, tap=tap)

    specs = (HEAD, HEAD, HEAD, jax.tree.map(lambda _: EXAMPLE, streaming.zero_tap(1)))
    sharded = jax.shard_map(
        tapped, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=HEAD
    )
    inputs = (*arrays(), streaming.zero_tap(LENGTH, (HEADS,)))
    value, (*gradients, statistics) = value_and_gradients(sharded, *inputs)
    assert_same((value, gradients), of_heads)
    upstream = np.cos(of_heads[0][1])
    wanted = jax.jit(dense.statistics)(*arrays(), upstream, MASK)
    for one, other in zip(statistics, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


def test_examples_inside_shard_map_that_share_keys():
    """What all devices have alike gets the sum of their gradients."""

    def several(attend, query, key, value):
        return jax.vmap(attend, (0, None, None))(query, key, value)

    sharded = jax.shard_map(
        functools.partial(several, attend),
        mesh=mesh(AxisType.Auto),
        in_specs=(EXAMPLE, PartitionSpec(), PartitionSpec()),
        out_specs=EXAMPLE,
    )
    query, *sources = arrays()
    sizes = np.array([1, 2, 0.5, 3], np.float32)
    inputs = (sizes[:, None, None, None] * query[None], *sources)
    wanted = value_and_gradients(functools.partial(several, dense_attend), *inputs)
    assert_same(value_and_gradients(sharded, *inputs), wanted)


@pytest.mark.parametrize("what", ["heads", "examples"])
def test_on_a_mesh_with_explicit_axes(what, of_heads):
    if what == "heads":
        function, inputs, spec, wanted = attend, arrays(), HEAD, of_heads
    else:
        function, inputs, spec = jax.vmap(attend), arrays(DEVICES), EXAMPLE
        wanted = value_and_gradients(jax.vmap(dense_attend), *inputs)
    devices = mesh(AxisType.Explicit)
    with jax.set_mesh(devices):
        dealt = [jax.device_put(a, NamedSharding(devices, spec)) for a in inputs]
        assert_same(value_and_gradients(function, *dealt), wanted)
