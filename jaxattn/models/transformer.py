"""A small transformer, and baselines of its size, as pure functions of one sequence.

The modules are flax.nnx; `init` splits off their parameters as nested dicts and `apply`
merges them in again, so that callers `vmap` over sequences and seeds, and differentiate
with respect to parameters. Attention is `streaming.attend`, so every head of every
layer obeys the laws, and reports them where it is given a tap.

Norms have neither scale nor bias of their own.

Letters in shapes: T positions, H heads, H_kv key-value heads, L layers, d width of a
head, C classes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx, serialization

from jaxattn.kernels import streaming
from jaxattn.theory import attention

KINDS = ("transformer", "mlp", "history_mlp", "gru")
NORMS = ("none", "pre", "post")
POSITIONS = ("none", "learned", "rotary", "learned_rotary")

Params = dict[str, Any]  # nested, leaves are arrays

# What a part of a parameter's path says about what it is for.
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

_ROTARY_BASE = 10_000.0


class ParamsError(ValueError):
    """Parameters that are not those of the architecture; names which."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a model is built as; hashable, so that it may be static.

    Raises:
      ValueError: a field that is none of what its comment says; names it.
    """

    kind: str  # of `KINDS`
    num_tokens: int  # 0: inputs are vectors
    d_x: int  # width of input vectors; 0: inputs are tokens
    num_classes: int
    length: int  # positions that learned ones, or a history, are for
    depth: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int  # key-value heads, a divisor of `heads`
    d_head: int
    mlp_width: int  # hidden units of each layer; 0: no MLP
    residual: bool
    norm: str  # of `NORMS`
    positions: str  # of `POSITIONS`
    bias: bool = False  # in projections and read-out; an MLP always has some
    value_norm: bool = False  # LayerNorm on the values of each head
    dropout_rate: float = 0.0  # of attention weights, while it trains

    def __post_init__(self):
        """Checks the fields."""
        wrong = next(_wrong_fields(self), None)
        if wrong is not None:
            name, allowed = wrong
            raise ValueError(f"{name}={getattr(self, name)!r}: allowed: {allowed}")


def _wrong_fields(a: Architecture) -> Iterator[tuple[str, str]]:
    """Fields that do not fit, each with what is allowed."""
    for name, names in (("kind", KINDS), ("norm", NORMS), ("positions", POSITIONS)):
        if getattr(a, name) not in names:
            yield name, f"one of {', '.join(names)}"
    for names, least in (
        (("num_classes", "length", "width", "heads", "kv_heads", "d_head"), 1),
        (("num_tokens", "d_x", "depth", "mlp_width"), 0),
    ):
        for name in names:
            size = getattr(a, name)
            if type(size) is not int or size < least:
                yield name, f"a whole number, at least {least}"
    for name in ("residual", "bias", "value_norm"):
        if type(getattr(a, name)) is not bool:
            yield name, "true or false"
    if type(a.dropout_rate) not in (int, float) or not 0 <= a.dropout_rate < 1:
        yield "dropout_rate", "a number from 0, below 1"
    if (a.num_tokens == 0) == (a.d_x == 0):
        yield "d_x", "0 for tokens, and 1 or more where num_tokens is 0"
    if a.kind == "transformer" and a.heads % a.kv_heads > 0:
        yield "kv_heads", f"a divisor of heads, {a.heads}"
    if a.positions.endswith("rotary"):
        if a.kind != "transformer":
            yield "positions", "none or learned without attention"
        if a.d_head % 2 > 0:
            yield "d_head", "an even number with rotary positions"


class Heads(NamedTuple):
    """What the heads of a layer work with, on one sequence."""

    query: jax.Array  # (T, H, d), as attended with: with its position, if rotary
    key: jax.Array  # (T, H_kv, d), likewise
    plain_key: jax.Array  # (T, H_kv, d), without its position
    value: jax.Array  # (T, H_kv, d), after a norm if there is one
    context: jax.Array  # (T, H, d)


class Activations(NamedTuple):
    """A forward pass of one sequence."""

    logit: jax.Array  # (T, C)
    residual: tuple[jax.Array, ...]  # L + 1 of (T, width): embedded, behind each layer
    heads: tuple[Heads, ...]  # of each layer; none without attention
    mlp: tuple[jax.Array, ...]  # (T, width) of each layer; none without an MLP


class Held(NamedTuple):
    """Queries and keys of a layer, held: attention that no longer moves."""

    query: jax.Array  # (T, H, d)
    key: jax.Array  # (T, H_kv, d)


class Ablation(NamedTuple):
    """Which parts are replaced by constants, and by which: zeros, or means."""

    heads: jax.Array  # (L, H) boolean, True is ablated
    mlps: jax.Array  # (L,) boolean
    context: jax.Array  # (L, H, d)
    mlp: jax.Array  # (L, width)


def init(architecture: Architecture, key: jax.Array) -> Params:
    """Draws parameters.

    Args:
      architecture: static.
      key: random key.

    Returns:
      Nested dicts: embed, blocks by number with attention (query, key, value, output)
      and mlp, unembed.
    """
    state = nnx.state(_KIND[architecture.kind](architecture, nnx.Rngs(key)), nnx.Param)
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
    """Forward pass of one sequence, looking only back.

    Args:
      architecture: static.
      params: from `init`.
      inputs: tokens (T,), or vectors (T, d_x). A token that is none of the
        architecture's makes NaN of its position and of all that look at it.
      key: of attention dropout; None: nothing is dropped.
      taps: for each layer `streaming.zero_tap(T, (H,))`: the gradient with respect to
        them is the laws' statistics of each head.
      held: attend with these queries and keys instead of the layers' own.
      ablation: parts to replace by constants.

    Returns:
      Activations.

    Raises:
      ParamsError: parameters of another architecture.
      ValueError: more inputs than there are learned positions.
    """
    chex.assert_rank(inputs, 1 if architecture.num_tokens else 2)
    check_params(architecture, params)
    graph, state = _skeleton(architecture)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy, to be filled
    nnx.replace_by_pure_dict(state, params)
    model = nnx.merge(graph, state)
    return model(inputs, _Asked(key, taps, held, ablation))


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
    """The role of a parameter, one of `ROLES`, from its path; None: it has none.

    Args:
      path: of `jax.tree_util`.
    """
    for part in path:
        name = getattr(part, "key", getattr(part, "name", None))
        if name in _ROLE_OF:
            return _ROLE_OF[name]
    return None


def size(architecture: Architecture) -> int:
    """How many parameters there are."""
    _, state = _skeleton(architecture)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def check_params(architecture: Architecture, params: Params) -> None:
    """Raises ParamsError unless names and shapes are those of the architecture.

    Args:
      architecture: that they should be of.
      params: nested dicts; blocks may be numbered, or named by their numbers.
    """
    _, state = _skeleton(architecture)
    wanted, found = _shapes(nnx.to_pure_dict(state)), _shapes(params)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not of it" for name in found if name not in wanted]
    problems += [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise ParamsError(
            f"parameters of a {architecture.kind}: {'; '.join(problems)}; allowed:"
            " those of this architecture"
        )


def restored(architecture: Architecture, params: dict[str, Any]) -> Params:
    """Parameters as they are written, where blocks have no numbers but names.

    Args:
      architecture: that they are of.
      params: nested dicts, such as `flax.serialization` reads.

    Raises:
      ParamsError: they are of another.
    """
    check_params(architecture, params)
    _, state = _skeleton(architecture)
    return serialization.from_state_dict(nnx.to_pure_dict(state), params)


# --- modules


class _Asked(NamedTuple):
    """What a pass is asked for beside its logits, see `apply`."""

    key: jax.Array | None
    taps: tuple[streaming.LawStatistics, ...] | None
    held: tuple[Held, ...] | None
    ablation: Ablation | None


class _Embed(nnx.Module):
    def __init__(self, a: Architecture, rngs: nnx.Rngs):
        if a.num_tokens:
            self.token = nnx.Embed(a.num_tokens, a.width, rngs=rngs)
        else:
            self.vector = nnx.Linear(a.d_x, a.width, use_bias=a.bias, rngs=rngs)
        if a.positions in ("learned", "learned_rotary"):
            # From zero, so that places beyond any it was trained on add nothing.
            zeros = nnx.initializers.zeros
            self.position = nnx.Embed(
                a.length, a.width, embedding_init=zeros, rngs=rngs
            )

    def __call__(self, inputs: jax.Array) -> jax.Array:
        if hasattr(self, "position") and len(inputs) > self.position.num_embeddings:
            raise ValueError(
                f"inputs of length {len(inputs)}: allowed: at most"
                f" {self.position.num_embeddings} positions, which are learned"
            )
        if hasattr(self, "token"):
            x = self._row(self.token, inputs)
        else:
            x = self.vector(inputs)
        if hasattr(self, "position"):
            x = x + self._row(self.position, jnp.arange(len(inputs)))
        return x

    def _row(self, table: nnx.Embed, index: jax.Array) -> jax.Array:
        # Called, `nnx.Embed` would make float32 of other precisions.
        rows = jnp.asarray(table.embedding.get_value())
        place = jnp.where(index < 0, len(rows), index)  # or it would count from the end
        return rows.at[place].get(mode="fill", fill_value=jnp.nan)


class _Attention(nnx.Module):
    def __init__(self, a: Architecture, rngs: nnx.Rngs):
        def project(heads: int) -> nnx.Linear:
            return nnx.Linear(a.width, heads * a.d_head, use_bias=a.bias, rngs=rngs)

        self.query, self.key = project(a.heads), project(a.kv_heads)
        self.value = project(a.kv_heads)
        self.output = nnx.Linear(
            a.heads * a.d_head, a.width, use_bias=a.bias, rngs=rngs
        )

    def look(self, a: Architecture, x: jax.Array, layer: int, asked: _Asked) -> Heads:
        query, key, value = (
            attention.split_heads(project(x), count)
            for project, count in (
                (self.query, a.heads),
                (self.key, a.kv_heads),
                (self.value, a.kv_heads),
            )
        )
        plain_key = key
        if a.positions in ("rotary", "learned_rotary"):
            query, key = rotate(query), rotate(key)
        if asked.held is not None:
            query, key = asked.held[layer]
        if a.value_norm:
            value = jax.vmap(_normed, in_axes=1, out_axes=1)(value)
        drops = a.dropout_rate > 0 and asked.key is not None
        context = streaming.attend(
            query,
            key,
            value,
            causal=True,
            dropout_rate=a.dropout_rate if drops else 0.0,
            dropout_key=jax.random.fold_in(asked.key, layer) if drops else None,
            tap=None if asked.taps is None else asked.taps[layer],
        )
        if asked.ablation is not None:
            gone = asked.ablation.heads[layer][None, :, None]
            constant = asked.ablation.context[layer][None]
            context = jnp.where(gone, constant, context)
        return Heads(query, key, plain_key, value, context)


class _Mlp(nnx.Module):
    def __init__(self, a: Architecture, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, a.mlp_width, rngs=rngs)
        self.down = nnx.Linear(a.mlp_width, a.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class _Block(nnx.Module):
    def __init__(self, a: Architecture, rngs: nnx.Rngs):
        if a.kind == "transformer":
            self.attention = _Attention(a, rngs)
        if a.mlp_width:
            self.mlp = _Mlp(a, a.width, rngs)


class _Stack(nnx.Module):
    """A transformer; without attention, an MLP that sees one position."""

    def __init__(self, a: Architecture, rngs: nnx.Rngs):
        self.architecture = a
        self.embed = _Embed(a, rngs)
        if a.kind == "history_mlp":
            self.mlp = _Mlp(a, a.length * a.width, rngs)
        self.blocks = nnx.List(_Block(a, rngs) for _ in range(a.depth))
        self.unembed = _unembed(a, rngs)

    def __call__(self, inputs: jax.Array, asked: _Asked) -> Activations:
        a = self.architecture
        x = self.embed(inputs)
        if a.kind == "history_mlp":
            x = x + self.mlp(_history(x, a.length))
        residual, heads, mlps = [x], [], []
        for layer, block in enumerate(self.blocks):
            if a.kind == "transformer":
                seen = block.attention.look(a, _before(a, x), layer, asked)
                heads.append(seen)
                context = seen.context.reshape(len(inputs), -1)
                x = _behind(a, x, block.attention.output(context))
            if a.mlp_width:
                found = block.mlp(_before(a, x))
                if asked.ablation is not None:
                    constant = asked.ablation.mlp[layer][None]
                    found = jnp.where(asked.ablation.mlps[layer], constant, found)
                mlps.append(found)
                x = _behind(a, x, found)
            residual.append(x)
        logit = self.unembed(_before(a, x))
        return Activations(logit, tuple(residual), tuple(heads), tuple(mlps))


class _Recurrent(nnx.Module):
    """Layers of gated recurrent units (Cho et al. 2014, arXiv 1406.1078)."""

    def __init__(self, a: Architecture, rngs: nnx.Rngs):
        self.architecture = a
        self.embed = _Embed(a, rngs)
        self.mlp = nnx.List(
            nnx.GRUCell(a.width, a.width, rngs=rngs) for _ in range(a.depth)
        )
        self.unembed = _unembed(a, rngs)

    def __call__(self, inputs: jax.Array, asked: _Asked) -> Activations:
        del asked
        x = self.embed(inputs)
        residual = [x]
        for cell in self.mlp:
            # `nnx.RNN` would want random numbers to start from zeros.
            _, x = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
            residual.append(x)
        return Activations(self.unembed(x), tuple(residual), (), ())


_KIND = {
    "transformer": _Stack,
    "mlp": _Stack,
    "history_mlp": _Stack,
    "gru": _Recurrent,
}


def rotate(array: jax.Array) -> jax.Array:
    """Turns queries or keys by angles that grow with their position.

    (x_n, x_{n+d/2}) turned by t b^{-2n/d}, b = 10,000: q_i·k_j then depends on i - j

    Args:
      array: (T, H, d), d even.

    Returns:
      The same shape and dtype; turned in float32 at least.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.
    """
    length, _, depth = array.shape
    chex.assert_is_divisible(depth, 2)
    # Half precision holds no position above 256 or 2048.
    dtype = jnp.float32 if array.dtype.itemsize < 4 else array.dtype
    rate = _ROTARY_BASE ** (-jnp.arange(0, depth, 2, dtype=dtype) / depth)
    angle = jnp.arange(length, dtype=dtype)[:, None] * rate[None]
    cosine, sine = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = jnp.split(array.astype(dtype), 2, axis=2)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(turned, axis=2).astype(array.dtype)


def _unembed(a: Architecture, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(a.width, a.num_classes, use_bias=a.bias, rngs=rngs)


def _before(a: Architecture, x: jax.Array) -> jax.Array:
    """What a part reads of the stream."""
    return _normed(x) if a.norm == "pre" else x


def _behind(a: Architecture, x: jax.Array, found: jax.Array) -> jax.Array:
    """The stream behind a part."""
    x = x + found if a.residual else found
    return _normed(x) if a.norm == "post" else x


def _normed(x: jax.Array) -> jax.Array:
    return attention.layer_norm(x, attention.NORM_EPSILON)


def _history(x: jax.Array, length: int) -> jax.Array:
    """(T, length * width): for each position what lies behind it, newest first."""
    back = jnp.arange(len(x))[:, None] - jnp.arange(length)[None]
    seen = jnp.where((back >= 0)[:, :, None], x[jnp.maximum(back, 0)], 0)
    return seen.reshape(len(x), -1)


@functools.lru_cache
def _skeleton(architecture: Architecture) -> tuple[nnx.GraphDef, nnx.State]:
    """A model without numbers."""
    model = nnx.eval_shape(lambda: _KIND[architecture.kind](architecture, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return graph, state


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        ".".join(str(getattr(part, "key", part)) for part in path): tuple(leaf.shape)
        for path, leaf in flat
    }
