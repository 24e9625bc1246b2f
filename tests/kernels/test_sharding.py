"""`streaming.attend` on several devices: the same results as on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxattn.kernels import streaming

LENGTH, HEADS, KV_HEADS, DEVICES = 140, 8, 4, 4
HEAD = PartitionSpec(None, "device")
EXAMPLE = PartitionSpec("device")

attend = functools.partial(streaming.attend, causal=True, block_size=128)


def arrays(*leading):
    rng = np.random.default_rng(0)

    def normal(heads):
        return jnp.asarray(rng.normal(size=(*leading, LENGTH, heads, 8)), jnp.float32)

    return normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)


def mesh(kind):
    return jax.make_mesh((DEVICES,), ("device",), axis_types=(kind,))


def value_and_gradients(function, *inputs):
    def total(*inputs):
        return jnp.sum(jnp.sin(function(*inputs)))

    return jax.jit(jax.value_and_grad(total, tuple(range(len(inputs)))))(*inputs)


def assert_same(found, wanted):
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_heads_inside_shard_map_and_their_statistics():
    def tapped(query, key, value, tap):
        return attend(query, key, value, tap=tap)

    specs = (HEAD, HEAD, HEAD, jax.tree.map(lambda _: EXAMPLE, streaming.zero_tap(1)))
    sharded = jax.shard_map(
        tapped, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=HEAD
    )
    inputs = (*arrays(), streaming.zero_tap(LENGTH, (HEADS,)))
    assert_same(
        value_and_gradients(sharded, *inputs), value_and_gradients(tapped, *inputs)
    )


def test_examples_inside_shard_map_that_share_keys():
    """What all devices have alike gets the sum of their gradients."""

    def several(query, key, value):
        return jax.vmap(attend, (0, None, None))(query, key, value)

    sharded = jax.shard_map(
        several,
        mesh=mesh(AxisType.Auto),
        in_specs=(EXAMPLE, PartitionSpec(), PartitionSpec()),
        out_specs=EXAMPLE,
    )
    query, *sources = arrays()
    inputs = (jnp.stack([query * size for size in (1, 2, 0.5, 3)]), *sources)
    assert_same(
        value_and_gradients(sharded, *inputs), value_and_gradients(several, *inputs)
    )


@pytest.mark.parametrize("what", ["heads", "examples"])
def test_on_a_mesh_with_explicit_axes(what):
    function = attend if what == "heads" else jax.vmap(attend)
    inputs = arrays() if what == "heads" else arrays(DEVICES)
    wanted = value_and_gradients(function, *inputs)
    devices = mesh(AxisType.Explicit)
    with jax.set_mesh(devices):
        spec = HEAD if what == "heads" else EXAMPLE
        dealt = [jax.device_put(a, NamedSharding(devices, spec)) for a in inputs]
        assert_same(value_and_gradients(function, *dealt), wanted)
