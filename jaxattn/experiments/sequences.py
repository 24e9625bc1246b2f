"""The sequences that a seed is given, and what is told of them to reports."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.experiments.experiment import (
    Claim,
    Need,
    Options,
    Problem,
    draw_several,
    stream,
)
from jaxattn.measures.base import Measure
from jaxattn.tasks import Batch, Task, TaskSpec


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Draws sequences of a task; `key` is that of a seed throughout."""

    spec: TaskSpec
    fields: Mapping[str, Any]  # `task` fields of a config
    batch_size: int
    fresh: bool  # whether each step draws new ones; on a grid its points say so

    def task(self, key: jax.Array) -> Task:
        """The task of a seed, with its own embeddings or those of all seeds."""
        if self.fields.get("embedding_seed", -1) >= 0:
            # One for all seeds, with an id of none of them.
            root = jax.random.key(self.fields["embedding_seed"])
            key = jax.random.fold_in(root, np.uint32(2**32 - 1))
        return self.spec.build(self.fields, stream(key, "embedding"))

    def of_step(self, key: jax.Array, step) -> Batch:
        """The sequences (batch_size, ...) of a step, if they are fresh ones."""
        data = jax.random.fold_in(stream(key, "data"), step)
        return draw_several(self.task(key).sample, data, self.batch_size)

    def batch(self, key: jax.Array, step, options: Options, problem: Problem) -> Batch:
        """The sequences that a step trains on."""
        return _only_if(
            self._is_fresh(options), lambda: self.of_step(key, step), problem.train
        )

    def trained_on(
        self, key: jax.Array, step, options: Options, problem: Problem
    ) -> tuple[Batch, jax.Array]:
        """The sequences of the last step, and exact Bayes on them."""

        def drawn() -> tuple[Batch, jax.Array]:
            batch = self.of_step(key, jnp.maximum(step - 1, 0))
            return batch, jax.vmap(self.task(key).bayes)(batch)

        given = problem.train, problem.log_bayes_train
        return _only_if(self._is_fresh(options), drawn, given)

    def _is_fresh(self, options: Options) -> jax.Array | bool:
        return options["fresh"] if options else self.fresh


def _only_if(condition: jax.Array | bool, drawn: Callable, otherwise):
    """A choice that a program makes, or that is made before there is one."""
    if isinstance(condition, bool):
        return drawn() if condition else otherwise
    return jax.lax.cond(condition, drawn, lambda: otherwise)


def mask_needs(spec: TaskSpec, fields: Mapping[str, Any]) -> tuple[Need, ...]:
    """What tracing needs for a causal mask: it, another and where they differ."""
    if not spec.causal:
        return ()
    length = spec.positions(fields)
    name = "length" if "length" in fields else "name"

    def too_much(room: int) -> str:
        return (
            f"task.{name}={fields[name]!r}: a causal mask of {length} positions does"
            f" not fit; must be of at most {math.isqrt(room // 3)} positions here"
        )

    return (Need(3 * length**2, too_much),)


def impossible(fields: Mapping[str, Any]) -> str:
    """Says what is wrong where a task draws evidence of probability zero."""
    return (
        f"task.name={fields['name']!r}: drew evidence that its own model calls"
        " impossible; must have task settings that give it a positive probability"
    )


def facts(
    view: str,
    spec: TaskSpec,
    fields: Mapping[str, Any],
    claims: list[Claim],
    measures: Mapping[str, Measure],
) -> dict[str, Any]:
    """What reports need to know beside the config, plain.

    Args:
      view: name of the view that shows the run.
      spec: of the task.
      fields: of the task.
      claims: to be judged.
      measures: of the user, by name.
    """
    task = {
        "num_classes": spec.num_classes(fields),
        "entropy_rate": spec.entropy_rate(fields),
        "learned": spec.learned,
        "shown": spec.shown,
        "lag": spec.lag,
        "note": spec.note,
        "causal": spec.causal,
        "positions": spec.positions(fields),
    }
    return {
        "view": view,
        "task": task,
        "measures": {
            name: {
                "about": measure.about,
                "unit": measure.unit,
                "null": measure.null is not None,
            }
            for name, measure in measures.items()
        },
        "claims": [claim._asdict() for claim in claims],
    }


def measured(
    measures: Mapping[str, Measure], key: jax.Array, observed
) -> dict[str, jax.Array]:
    """Evaluates measures and their nulls on one sequence.

    Args:
      measures: by name.
      key: of what they draw.
      observed: see `measures.base.Observed`.

    Returns:
      NAME, and NAME_null where there is one -> scalar.
    """
    found = {}
    for number, (name, measure) in enumerate(measures.items()):
        own, null = jax.random.split(jax.random.fold_in(key, number))
        found[name] = measure.of(observed, own)
        if measure.null is not None:
            found[f"{name}_null"] = measure.null(observed, null)
    return found
