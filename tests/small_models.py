"""Small transformers for the tests: architectures, parameters, inputs."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.models import transformer
from jaxattn.models.transformer import Architecture
from jaxattn.theory import attention

TOKENS, CLASSES, LENGTH = 7, 5, 9


def architecture(**changes):
    fields = {
        "kind": "transformer",
        "num_tokens": TOKENS,
        "d_x": 0,
        "num_classes": CLASSES,
        "length": LENGTH,
        "depth": 2,
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
def _shapes(model):
    key = jax.random.key(0)
    return jax.eval_shape(functools.partial(transformer.init, model), key)


def drawn(model, dtype=np.float32):
    """Parameters that are zero nowhere; NumPy, and the same at the same path.

    So models differ in their options alone, and nothing is compiled.
    """

    def draw(path, leaf):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return (0.3 * rng.normal(size=leaf.shape)).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, _shapes(model))


def tokens(seed, length=LENGTH):
    return np.random.default_rng(seed).integers(0, TOKENS, length).astype(np.int32)


def targets(seed, length=LENGTH):
    return np.random.default_rng(seed).integers(0, CLASSES, length).astype(np.int32)


def one_head_problem():
    """A transformer that is one head, and the same head as `attention` has it."""
    params = drawn(ONE_HEAD, np.float64)
    params["embed"]["vector"]["kernel"] = np.eye(8)
    inputs = np.random.default_rng(1).normal(size=(LENGTH, 8))
    block = params["blocks"][0]["attention"]
    head = attention.Params(
        *(block[name]["kernel"] for name in ("query", "key", "value")),
        block["output"]["kernel"] @ params["unembed"]["kernel"],
    )
    return jax.tree.map(jnp.asarray, (params, head, inputs))
