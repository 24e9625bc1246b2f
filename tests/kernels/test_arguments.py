"""Arguments of `attend`: integers of any type, and what is refused."""

import numpy as np
import pytest

from jaxattn.kernels import streaming


def shaped(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("key_length", "sources"),
    [
        (np.uint32(2**32 - 1), 12),
        (np.int64(2**40), 12),
        (2**31, 12),
        (np.int8(5), 5),
        (np.uint64(5), 5),
        (-(2**40), 0),
    ],
)
def test_a_key_length_of_any_integer_type(key_length, sources):
    value = np.arange(1, 13, dtype=np.float32)[:, None]
    context = streaming.attend(
        shaped(1, 4), shaped(12, 4), value, key_length=key_length, block_size=5
    )
    assert context[0, 0] == pytest.approx((sources + 1) / 2 if sources else 0)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(9, 2, 4), (9, 4), (9, 2, 4)], r"must be \(T, H, d\), or \(T, d\)"),
        ([(9, 2, 4), (9, 2, 5), (9, 2, 4)], "must have query as wide as key"),
        ([(9, 2, 4), (9, 2, 4), (8, 2, 4)], "key as long as value"),
        ([(9, 3, 4), (9, 2, 4), (9, 2, 4)], "must have a multiple of the key's heads"),
        ([(9, 2, 4), (0, 2, 4), (0, 2, 4)], "must have no empty axis"),
        ([(9, 0, 4), (9, 0, 4), (9, 0, 4)], "must have no empty axis"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        streaming.attend(*(shaped(*shape) for shape in shapes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": shaped(9, 9)}, "mask of float32: must be bool"),
        ({"mask": shaped(9, 8, dtype=bool)}, r"mask \(9, 8\): must broadcast to"),
        ({"bias": shaped(9, 9, dtype=int)}, "bias of int32: must be floating"),
        ({"bias": shaped(1, 2, 9, 9)}, r"bias \(1, 2, 9, 9\): must broadcast to"),
        ({"window": -1}, "window=-1: must not be empty"),
        ({"window": (1, -2)}, r"window=\(1, -2\): must not be empty"),
        ({"window": (-1, 3), "causal": True}, "must not be empty"),
        ({"window": 2.5}, "window=2.5: must be one or two integers, or None"),
        ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\): must be one or two integers"),
        ({"window": (-(2**31), None)}, "window=.*: must be one or two integers, or"),
        ({"block_size": (4.0, 4)}, r"block_size=\(4.0, 4\): must be one or two int"),
        ({"block_size": 0}, "block_size=0: must be one or two integers, at least 1"),
        ({"key_length": 2.7}, "key_length=2.7: must be an integer"),
        ({"key_length": np.array([2, 3])}, "key_length=.*: must be an integer"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        streaming.attend(*[shaped(9, 2, 4)] * 3, **options)


def test_one_floating_point_type():
    query = shaped(9, 4)
    with pytest.raises(
        ValueError, match=r"dtypes \['float32', 'int32'\]: must be one floating"
    ):
        streaming.attend(query, query, query.astype(np.int32))
