"""Layers of a transformer and of its baselines, as flax.nnx modules.

Norms have neither scale nor bias of their own. Attention is `streaming.attend`, so
every head of every layer obeys the laws, and reports them where it is given a tap.

Letters in shapes: T positions, H heads, H_kv key-value heads, L layers, d width of a
head, C classes.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from jaxattn.kernels import streaming
from jaxattn.models.architecture import Architecture
from jaxattn.theory import attention

_ROTARY_BASE = 10_000.0


class Heads(NamedTuple):
    """Activations of the heads of a layer, on one sequence."""

    query: jax.Array  # (T, H, d), with rotary positions if there are any
    key: jax.Array  # (T, H_kv, d), likewise
    plain_key: jax.Array  # (T, H_kv, d), without positions
    value: jax.Array  # (T, H_kv, d), after a norm if there is one
    context: jax.Array  # (T, H, d)


class Activations(NamedTuple):
    """A forward pass of one sequence."""

    logit: jax.Array  # (T, C)
    residual: tuple[jax.Array, ...]  # L + 1 of (T, width): embedded, after each layer
    heads: tuple[Heads, ...]  # of each layer; none without attention
    mlp: tuple[jax.Array, ...]  # (T, width) of each layer; none without an MLP


class Held(NamedTuple):
    """Fixed queries and keys of a layer, and so fixed attention."""

    query: jax.Array  # (T, H, d)
    key: jax.Array  # (T, H_kv, d)


class Ablation(NamedTuple):
    """Parts that are replaced by constants, and the constants: zeros, or means."""

    heads: jax.Array  # (L, H) boolean, True is ablated
    mlps: jax.Array  # (L,) boolean
    context: jax.Array  # (L, H, d)
    mlp: jax.Array  # (L, width)


class Options(NamedTuple):
    """Options of a forward pass, see `transformer.apply`."""

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
            # From zero, so that positions beyond those of training add nothing.
            zeros = nnx.initializers.zeros
            self.position = nnx.Embed(
                a.length, a.width, embedding_init=zeros, rngs=rngs
            )

    def __call__(self, inputs: jax.Array) -> jax.Array:
        if hasattr(self, "position") and len(inputs) > self.position.num_embeddings:
            raise ValueError(
                f"inputs of length {len(inputs)}: must be at most"
                f" {self.position.num_embeddings} long, the number of learned positions"
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

    def heads(
        self, a: Architecture, x: jax.Array, layer: int, options: Options
    ) -> Heads:
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
        if options.held is not None:
            query, key = options.held[layer]
        if a.value_norm:
            value = jax.vmap(_normed, in_axes=1, out_axes=1)(value)
        drops = a.dropout_rate > 0 and options.key is not None
        context = streaming.attend(
            query,
            key,
            value,
            causal=True,
            dropout_rate=a.dropout_rate if drops else 0.0,
            dropout_key=jax.random.fold_in(options.key, layer) if drops else None,
            tap=None if options.taps is None else options.taps[layer],
        )
        if options.ablation is not None:
            ablated = options.ablation.heads[layer][None, :, None]
            constant = options.ablation.context[layer][None]
            context = jnp.where(ablated, constant, context)
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
    """A transformer; without attention, an MLP of one position, or of a history."""

    def __init__(self, a: Architecture, rngs: nnx.Rngs):
        self.architecture = a
        self.embed = _Embed(a, rngs)
        if a.kind == "history_mlp":
            self.mlp = _Mlp(a, a.length * a.width, rngs)
        self.blocks = nnx.List(_Block(a, rngs) for _ in range(a.depth))
        self.unembed = _unembed(a, rngs)

    def __call__(self, inputs: jax.Array, options: Options) -> Activations:
        a = self.architecture
        x = self.embed(inputs)
        if a.kind == "history_mlp":
            x = x + self.mlp(history(x, a.length))
        residual, heads, mlps = [x], [], []
        for layer, block in enumerate(self.blocks):
            if a.kind == "transformer":
                of_layer = block.attention.heads(a, _read(a, x), layer, options)
                heads.append(of_layer)
                context = of_layer.context.reshape(len(inputs), -1)
                x = _write(a, x, block.attention.output(context))
            if a.mlp_width:
                output = block.mlp(_read(a, x))
                if options.ablation is not None:
                    constant = options.ablation.mlp[layer][None]
                    output = jnp.where(options.ablation.mlps[layer], constant, output)
                mlps.append(output)
                x = _write(a, x, output)
            residual.append(x)
        logit = self.unembed(_read(a, x))
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

    def __call__(self, inputs: jax.Array, _: Options) -> Activations:
        x = self.embed(inputs)
        residual = [x]
        for cell in self.mlp:
            # `nnx.RNN` would need random numbers to start from zeros.
            _, x = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
            residual.append(x)
        return Activations(self.unembed(x), tuple(residual), (), ())


def build(architecture: Architecture, rngs: nnx.Rngs) -> nnx.Module:
    """A model with its parameters: (inputs, options) -> Activations.

    Args:
      architecture: of the model.
      rngs: to draw the parameters.
    """
    kind = _Recurrent if architecture.kind == "gru" else _Stack
    return kind(architecture, rngs)


def rotate(array: jax.Array) -> jax.Array:
    """Rotates queries or keys by angles that grow with their position.

    (x_n, x_{n+d/2}) by t b^{-2n/d}, b = 10,000: q_i·k_j then depends on i - j alone

    Args:
      array: (T, H, d), d even.

    Returns:
      The same shape and dtype; rotated in float32 at least.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.
    """
    length, _, depth = array.shape
    chex.assert_is_divisible(depth, 2)
    # Half precision has no integers above 256 or 2048.
    dtype = jnp.float32 if array.dtype.itemsize < 4 else array.dtype
    rate = _ROTARY_BASE ** (-jnp.arange(0, depth, 2, dtype=dtype) / depth)
    angle = jnp.arange(length, dtype=dtype)[:, None] * rate[None]
    cosine, sine = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = jnp.split(array.astype(dtype), 2, axis=2)
    rotated = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(rotated, axis=2).astype(array.dtype)


def _unembed(a: Architecture, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(a.width, a.num_classes, use_bias=a.bias, rngs=rngs)


def _read(a: Architecture, x: jax.Array) -> jax.Array:
    """Input of a part, from the residual stream."""
    return _normed(x) if a.norm == "pre" else x


def _write(a: Architecture, x: jax.Array, output: jax.Array) -> jax.Array:
    """The residual stream after a part."""
    x = x + output if a.residual else output
    return _normed(x) if a.norm == "post" else x


def _normed(x: jax.Array) -> jax.Array:
    return attention.layer_norm(x, attention.NORM_EPSILON)


def history(x: jax.Array, length: int) -> jax.Array:
    """The last vectors up to each position, newest first, side by side.

    Args:
      x: (T, width).
      length: number of vectors; zeros stand for those before the first.

    Returns:
      (T, length * width).
    """
    back = jnp.arange(len(x))[:, None] - jnp.arange(length)[None]
    vectors = jnp.where((back >= 0)[:, :, None], x[jnp.maximum(back, 0)], 0)
    return vectors.reshape(len(x), -1)
