"""Trains a small Flax transformer and reads the laws of every head at every step.

    python scripts/tapped_transformer.py --help

The task is induction: random symbols that repeat with a period that differs from
sequence to sequence. From the second period on every symbol can be predicted, by a head
that attends to the successor of the last occurrence of the present symbol.

The model is plain flax.nnx, except for `attention_fn` and for the taps among the
arguments of `nnx.grad`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxattn.cli import command
from jaxattn.fields import integer
from jaxattn.kernels import flax_attention
from jaxattn.views import tables

SYMBOLS, LENGTH, EXAMPLES, HEADS, WIDTH, LAYERS = 16, 31, 32, 2, 32, 2


class Transformer(nnx.Module):
    """Attention and residuals; no MLP."""

    def __init__(self, rngs: nnx.Rngs):
        """Draws the weights."""
        self.embed = nnx.Embed(SYMBOLS, WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.norms = nnx.List(nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(LAYERS))
        self.layers = nnx.List(
            nnx.MultiHeadAttention(
                num_heads=HEADS,
                in_features=WIDTH,
                decode=False,
                attention_fn=flax_attention.TappedAttention(LENGTH, (EXAMPLES, HEADS)),
                rngs=rngs,
            )
            for _ in range(LAYERS)
        )
        self.out = nnx.Linear(WIDTH, SYMBOLS, rngs=rngs)

    def __call__(self, symbols: jax.Array) -> jax.Array:
        """Logits (N, T, SYMBOLS) of symbols (N, T)."""
        x = self.embed(symbols) + self.place(jnp.arange(LENGTH))[None]
        for norm, attend in zip(self.norms, self.layers, strict=True):
            x = x + attend(norm(x), is_causal=True)
        return self.out(x)


def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sequences (N, T + 1) that repeat, and the period of each (N, 1)."""
    symbol_key, period_key = jax.random.split(key)
    symbols = jax.random.randint(symbol_key, (EXAMPLES, LENGTH + 1), 0, SYMBOLS)
    period = jax.random.randint(period_key, (EXAMPLES, 1), LENGTH // 4, LENGTH // 2)
    place = jnp.arange(LENGTH + 1)[None] % period
    return jnp.take_along_axis(symbols, place, axis=1), period


def loss(model: Transformer, symbols: jax.Array, period: jax.Array) -> jax.Array:
    """Mean cross-entropy of the symbols that can be predicted, nats."""
    logit = model(symbols[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logit, symbols[:, 1:])
    return jnp.mean(each, where=jnp.arange(LENGTH)[None] >= period)


@nnx.jit
def step(model: Transformer, optimizer: nnx.Optimizer, key: jax.Array):
    """One step of Adam; the loss, and for each layer its `LawStatistics` (N, H)."""
    wanted = nnx.DiffState(0, nnx.Any(nnx.Param, flax_attention.Tap))
    value, gradient = nnx.value_and_grad(loss, argnums=wanted)(model, *draw(key))
    parameters, taps = nnx.split_state(gradient, nnx.Param, flax_attention.Tap)
    optimizer.update(model, parameters)
    statistics = [
        taps["layers"][n]["attention_fn"]["tap"].get_value() for n in range(LAYERS)
    ]
    return value, statistics


def main(line: command.Line) -> int:
    """Trains, and prints a table; returns the exit code."""
    steps = line.flags.steps
    root = jax.random.key(line.flags.seed)
    model = Transformer(nnx.Rngs(jax.random.fold_in(root, 0)))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    names = [f"{n + 1}.{h + 1}" for n in range(LAYERS) for h in range(HEADS)]
    columns = [f"{what} {name}" for what in ("H", "P") for name in names]
    rows = [["step", "loss", *columns]]
    for number in range(steps):
        key = jax.random.fold_in(root, number + 1)
        value, statistics = step(model, optimizer, key)
        if number % max(steps // 10, 1) == 0 or number == steps - 1:
            # The loss is a mean over examples: N times its gradient is one example's.
            entropy = [np.mean(s.relative_entropy, axis=0) for s in statistics]
            pressure = [
                EXAMPLES**2 * np.mean(s.routing_pressure, axis=0) for s in statistics
            ]
            cells = [f"{x:.2f}" for x in np.ravel(entropy)]
            cells += [f"{x:.1e}" for x in np.ravel(pressure)]
            rows.append([str(number), f"{value:.3f}", *cells])
    print("H: relative entropy, P: routing pressure, of layer.head; means of examples")
    print(tables.text_table(rows))
    return 0


COMMAND = command.Command(
    about="Trains a small Flax transformer, and reads the laws of every head at every"
    " step.",
    flags=(
        command.Flag("steps", 600, integer(1, 1_000_000_000), "training steps"),
        command.Flag(
            *("seed", 0, integer(0, 2**31 - 1)), "of the weights and the sequences"
        ),
    ),
    main=main,
    examples=("--steps=50",),
)

if __name__ == "__main__":
    sys.exit(command.run(COMMAND, sys.argv))
