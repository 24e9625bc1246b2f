"""The toy: a handful of random inputs with random labels, to be learned by heart.

Nothing of one sequence says anything of another, so exact Bayes answers 1/C everywhere,
and a training loss below log C is memory. What there is to see is how the head moves.

Source: arXiv 2512.22473, section 7.1.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.tasks.base import Batch, Task
from jaxattn.theory.attention import check_size


def toy(*, length: int, num_classes: int, d_x: int) -> Task:
    """The task: x_t ~ N(0, I), y_t uniform over the classes, all independent.

    Args:
      length: T, positions, at least 1.
      num_classes: C, at least 2.
      d_x: width of the inputs, at least 1.

    Returns:
      Task; a head may look everywhere.

    Raises:
      ValueError: a number that is none of these.
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
