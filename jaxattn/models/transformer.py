"""A small transformer, and baselines of its size, as pure functions of one sequence.

`init` splits the parameters off the modules of `layers` as nested dicts and `apply`
merges them in again, so that callers `vmap` over sequences and seeds, and differentiate
with respect to parameters.

Letters in shapes: T positions, H heads, L layers, C classes.
"""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx, serialization

from jaxattn.kernels import streaming
from jaxattn.models import layers
from jaxattn.models.architecture import KINDS, NORMS, POSITIONS, Architecture
from jaxattn.models.layers import Ablation, Activations, Heads, Held, rotate

__all__ = [
    "KINDS",
    "NORMS",
    "POSITIONS",
    "ROLES",
    "Ablation",
    "Activations",
    "Architecture",
    "Heads",
    "Held",
    "Params",
    "ParamsError",
    "apply",
    "check_params",
    "init",
    "restored",
    "role_of",
    "rotate",
    "size",
    "zero_taps",
]

Params = dict[str, Any]  # nested, leaves are arrays

# Role of a parameter by a part of its path.
_ROLE_OF = {
    "query": "query",
    "key": "key",
    "value": "value",
    "output": "output",
    "unembed": "output",
    "mlp": "mlp",
    "embed": "embed",
}
ROLES = ("query", "key", "value", "output", "mlp", "embed")


class ParamsError(ValueError):
    """Parameters do not fit the architecture; names which."""


def init(architecture: Architecture, key: jax.Array) -> Params:
    """Draws parameters.

    Args:
      architecture: static.
      key: random key.

    Returns:
      Nested dicts: embed, blocks by number with attention (query, key, value, output)
      and mlp, unembed.
    """
    state = nnx.state(layers.build(architecture, nnx.Rngs(key)), nnx.Param)
    return nnx.to_pure_dict(state)


def apply(
    architecture: Architecture,
    params: Params,
    inputs: jax.Array,
    *,
    key: jax.Array | None = None,
    taps: tuple[streaming.LawStatistics, ...] | None = None,
    held: tuple[Held, ...] | None = None,
    ablation: Ablation | None = None,
) -> Activations:
    """Forward pass of one sequence, causal.

    Args:
      architecture: static.
      params: from `init`.
      inputs: tokens (T,), or vectors (T, d_x). A token that is not below num_tokens, or
        below 0, makes NaN of its position and of all that attend to it.
      key: of attention dropout; None: no dropout.
      taps: for each layer `streaming.zero_tap(T, (H,))`: the gradient with respect to
        them is the laws' statistics of each head.
      held: fixed queries and keys, for each layer, in place of its own.
      ablation: parts to replace by constants.

    Returns:
      Activations.

    Raises:
      ParamsError: the parameters are of another architecture.
      ValueError: there are more inputs than learned positions.
    """
    chex.assert_rank(inputs, 1 if architecture.num_tokens else 2)
    check_params(architecture, params)
    graph, state = _skeleton(architecture)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy, to be filled
    nnx.replace_by_pure_dict(state, params)
    model = nnx.merge(graph, state)
    return model(inputs, layers.Options(key, taps, held, ablation))


def zero_taps(
    architecture: Architecture, length: int, dtype=jnp.float32
) -> tuple[streaming.LawStatistics, ...]:
    """Taps for `apply`: one for each layer, () without attention.

    Args:
      architecture: static.
      length: T of every call.
      dtype: of the statistics.
    """
    if architecture.kind != "transformer":
        return ()
    tap = streaming.zero_tap(length, (architecture.heads,), dtype)
    return (tap,) * architecture.depth


def role_of(path: tuple) -> str | None:
    """Role of a parameter, one of `ROLES`, from its path; None: it has none.

    Args:
      path: of `jax.tree_util`.
    """
    for part in path:
        name = getattr(part, "key", getattr(part, "name", None))
        if name in _ROLE_OF:
            return _ROLE_OF[name]
    return None


def size(architecture: Architecture) -> int:
    """Number of parameters."""
    _, state = _skeleton(architecture)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def check_params(architecture: Architecture, params: Params) -> None:
    """Checks names and shapes of parameters.

    Args:
      architecture: that they must fit.
      params: nested dicts; blocks may be numbered, or named by their numbers.

    Raises:
      ParamsError: they do not fit; names which.
    """
    _, state = _skeleton(architecture)
    wanted, found = _shapes(nnx.to_pure_dict(state)), _shapes(params)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in wanted]
    problems += [
        f"{name} is {found[name]}, must be {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise ParamsError(
            f"parameters of a {architecture.kind}: {'; '.join(problems)}; must be those"
            " of this architecture"
        )


def restored(architecture: Architecture, params: dict[str, Any]) -> Params:
    """Parameters from a file, where blocks have names in place of numbers.

    Args:
      architecture: of the parameters.
      params: nested dicts, as `flax.serialization` reads them.

    Raises:
      ParamsError: the parameters are of another architecture.
    """
    check_params(architecture, params)
    _, state = _skeleton(architecture)
    return serialization.from_state_dict(nnx.to_pure_dict(state), params)


@functools.lru_cache
def _skeleton(architecture: Architecture) -> tuple[nnx.GraphDef, nnx.State]:
    """A model with shapes in place of numbers."""
    model = nnx.eval_shape(lambda: layers.build(architecture, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return graph, state


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        ".".join(str(getattr(part, "key", part)) for part in path): tuple(leaf.shape)
        for path, leaf in flat
    }
