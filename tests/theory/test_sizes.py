"""The check of sizes, and who has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.theory import attention, masks
from jaxattn.theory.sizes import check_size


@pytest.mark.parametrize("size", [2, 5, np.int32(3)])
def test_a_size_within_bounds(size):
    check_size("d_k", size, 2, 5)
    check_size("d_k", size)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "3"])
def test_a_size_that_is_none(size):
    with pytest.raises(ValueError, match=f"^d_k={size!r}: must be an integer, at lea"):
        check_size("d_k", size)


@pytest.mark.parametrize("size", [1, 6])
def test_a_size_out_of_bounds(size):
    with pytest.raises(ValueError, match=f"d_k={size}: must be an integer from 2 to 5"):
        check_size("d_k", size, 2, 5)


@pytest.mark.parametrize("size", ["d_x", "d_k", "d_v", "num_classes"])
def test_a_head_of_no_size(size):
    sizes = {"d_x": 3, "d_k": 2, "d_v": 2, "num_classes": 4}
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match=rf"{size}={wrong}: must be an integer"):
            attention.init_params(jax.random.key(0), **sizes | {size: wrong})


@pytest.mark.parametrize("length", [0, -1, 2.5, True])
def test_a_mask_of_no_length(length):
    with pytest.raises(ValueError, match=f"length={length}: must be an integer"):
        masks.causal_mask(length)


def test_no_heads_are_named():
    with pytest.raises(ValueError, match="num_heads=0: must be an integer"):
        attention.split_heads(np.zeros((4, 6)), 0)
    with pytest.raises(ValueError, match="=0: must be an integer"):
        attention.repeat_heads(jnp.zeros((4, 0, 3)), 2)
