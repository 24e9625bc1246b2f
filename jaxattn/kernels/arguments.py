"""Checks of the arguments of `attend`, and what follows from them while tracing.

Dropout's are in `dropout`, taps' in `statistics`.
"""

import jax
import jax.numpy as jnp
import numpy as np


def check_arrays(query, key, value) -> None:
    """Raises ValueError unless query, key and value fit in shape and dtype."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (2, 3):
        raise ValueError(f"{shapes}: must be (T, H, d), or (T, d) without heads")
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{shapes}: must have query as wide as key, key as long as value"
        )
    if 0 in query.shape + key.shape + value.shape:
        raise ValueError(f"{shapes}: must have no empty axis")
    if query.ndim == 3 and query.shape[1] % key.shape[1] > 0:
        raise ValueError(
            f"{shapes}: must have a multiple of the key's heads in the query"
        )
    dtypes = {array.dtype.name for array in (query, key, value)}
    if len(dtypes) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"dtypes {sorted(dtypes)}: must be one floating-point type")


def full_rank(name: str, array, shape: tuple[int, ...]) -> jax.Array | None:
    """An array that broadcasts to `shape`, with as many axes; None stays None.

    Args:
      name: of the argument, for the error.
      array: or None.
      shape: to broadcast to.

    Returns:
      The array, with axes of length 1 in front.

    Raises:
      ValueError: it does not broadcast to the shape.
    """
    if array is None:
        return None
    array = jnp.asarray(array)
    full = (1,) * (len(shape) - array.ndim) + array.shape
    if len(full) > len(shape) or any(
        size not in (1, wanted) for size, wanted in zip(full, shape, strict=True)
    ):
        raise ValueError(f"{name} {array.shape}: must broadcast to {shape}")
    return array.reshape(full)


def check_cover(mask, bias, shape: tuple[int, ...]):
    """Checks mask and bias, and returns them with three axes, for (H, T, S).

    Args:
      mask: boolean, broadcastable to the shape, or None.
      bias: floating-point, broadcastable to the shape, or None.
      shape: (H, T, S), or (T, S).

    Returns:
      Mask and bias.

    Raises:
      ValueError: a wrong shape or type.
    """
    mask, bias = full_rank("mask", mask, shape), full_rank("bias", bias, shape)
    if mask is not None and mask.dtype != bool:
        raise ValueError(
            f"mask of {mask.dtype}: must be bool, True where i may attend to j"
        )
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"bias of {bias.dtype}: must be floating-point")
    return [
        array if array is None or array.ndim == 3 else array[None]
        for array in (mask, bias)
    ]


def check_key_length(key_length) -> jax.Array | None:
    """Checks a key length, and returns it in 32 bits; None stays None.

    Args:
      key_length: integer, may be traced, or None.

    Returns:
      Scalar int32, or None.

    Raises:
      ValueError: not an integer.
    """
    if key_length is None:
        return None
    array = key_length if isinstance(key_length, jax.Array) else np.asarray(key_length)
    if array.ndim > 0 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"key_length={key_length!r}: must be an integer")
    # A number that 32 bits cannot hold is after the last source, or before the first.
    bounds = (jnp.iinfo(kind) for kind in (array.dtype, jnp.int32))
    own, int32 = ((int(bound.min), int(bound.max)) for bound in bounds)
    return array.clip(max(own[0], int32[0]), min(own[1], int32[1])).astype(jnp.int32)


def block_sizes(block_size, length: int, sources: int, width: int) -> tuple[int, int]:
    """Rows and columns of a block.

    Measured on x86: products of wide heads need large blocks to use several cores;
    narrow heads are bound by the work for each score, which should stay in cache.

    Args:
      block_size: of `attend`.
      length: T.
      sources: S.
      width: the larger of d_k and d_v.

    Returns:
      At most (T, S).

    Raises:
      ValueError: a size is not an integer of at least 1.
    """
    if block_size is None:
        large = jax.default_backend() != "cpu" or width >= 32
        block_size = 512 if large else 256
    must = "one or two integers, at least 1"
    rows, columns = _pair("block_size", block_size, must)
    if not all(_is_integer(size) and size >= 1 for size in (rows, columns)):
        raise ValueError(f"block_size={block_size!r}: must be {must}")
    return min(int(rows), length), min(int(columns), sources)


def band(causal: bool, window, length: int, sources: int):
    """Sources that a query attends to: from i + low to i + high.

    Args:
      causal: of `attend`.
      window: of `attend`.
      length: T.
      sources: S.

    Returns:
      low and high; None: no bound.

    Raises:
      ValueError: the window is not of integers, or empty.
    """
    must = "one or two integers, or None"
    before, after = _pair("window", window, must)
    for side in (before, after):
        if side is not None and not (_is_integer(side) and side >= -(2**30)):
            raise ValueError(f"window={window!r}: must be {must}")
    end = 0 if causal and (after is None or after > 0) else after
    if before is not None and end is not None and before + end < 0:
        raise ValueError(f"window={window!r}: must not be empty")
    before = None if before is None or before >= length + sources else int(before)
    after = None if after is None or after >= length + sources else int(after)
    if causal:
        after = 0 if after is None else min(after, 0)
    shift = sources - length
    return (
        None if before is None else shift - before,
        None if after is None else shift + after,
    )


def _pair(name: str, value, must: str) -> tuple:
    """A pair, or a number twice."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name}={value!r}: must be {must}")
    return tuple(pair)


def _is_integer(number) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)
