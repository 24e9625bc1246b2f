"""Several devices: which arrays differ between them, and which are dealt out."""

import jax


def manual_axes(tree) -> tuple[str, ...]:
    """Axes of a `shard_map` along which any of these arrays differ; () without one."""
    axes = map(_varies_along, jax.tree.leaves(tree))
    return tuple(sorted(frozenset().union(*axes)))


def varying(tree, axes: tuple[str, ...]):
    """The same arrays, as ones that differ along these axes of a `shard_map`."""

    def one(leaf: jax.Array) -> jax.Array:
        new = tuple(axis for axis in axes if axis not in _varies_along(leaf))
        return jax.lax.pcast(leaf, new, to="varying") if new else leaf

    return jax.tree.map(one, tree)


def is_sharded(array: jax.Array) -> bool:
    """Whether the first axis of an array is divided over devices (explicit mesh)."""
    return jax.typeof(array).sharding.spec[0] is not None


def _varies_along(array: jax.Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying
