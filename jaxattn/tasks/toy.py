"""The toy: a handful of random inputs with random labels, to be memorised.

Sequences are independent, so exact Bayes is 1/C everywhere and a training loss below
log C is memory. The task is for studying how the head moves.

Source: arXiv 2512.22473, section 7.1.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.fields import integer
from jaxattn.tasks.base import Batch, Task, TaskSpec
from jaxattn.theory.sizes import check_size


def toy(*, length: int, num_classes: int, d_x: int) -> Task:
    """Returns the task: x_t ~ N(0, I), y_t uniform over the classes, all independent.

    Args:
      length: T, positions, at least 1.
      num_classes: C, at least 2.
      d_x: width of the inputs, at least 1.

    Returns:
      Task; a head may attend to every position.

    Raises:
      ValueError: a size out of range.
    """
    check_size("length", length, 1)
    check_size("num_classes", num_classes, 2)
    check_size("d_x", d_x, 1)

    def sample(key: jax.Array) -> Batch:
        input_key, target_key = jax.random.split(key)
        inputs = jax.random.normal(input_key, (length, d_x))
        return Batch(inputs, jax.random.randint(target_key, (length,), 0, num_classes))

    def bayes(batch: Batch) -> jax.Array:
        shape = (len(batch.targets), num_classes)
        return jnp.full(shape, -np.log(num_classes), batch.inputs.dtype)

    return Task(sample, bayes)


SPEC = TaskSpec(
    # Nothing but the sequences is random: there are no embeddings.
    build=lambda fields, _: toy(
        length=fields["length"], num_classes=fields["num_classes"], d_x=fields["d_x"]
    ),
    fields={
        "length": integer(2, 1_000_000),
        "num_classes": integer(2, 1000),
        "d_x": integer(1, 100_000),
    },
    positions=lambda fields: fields["length"],
    num_classes=lambda fields: fields["num_classes"],
    causal=False,
    entropy_rate=lambda fields: math.log(fields["num_classes"]),
    # Other sequences cannot be predicted: only this one is learned.
    learned="train_loss",
    shown="train",
    note="Labels are random: exact Bayes is chance, whatever is learned is memory, and"
    " no held-out loss can be better than chance but by luck.",
)
