"""The tasks a config can name, and how each is built from its `task` fields."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from jaxattn.tasks import markov
from jaxattn.tasks.base import Task
from jaxattn.tasks.sticky import sticky, transition_matrix


class Entry(NamedTuple):
    """A task family, as functions of the `task` fields of a config."""

    build: Callable[[ConfigDict, jax.Array], Task]  # fields, embedding key -> task
    causal: bool  # whether a head may only look back
    num_classes: Callable[[ConfigDict], int]
    entropy_rate: Callable[[ConfigDict], float]  # nats


def _build_sticky(fields: ConfigDict, embedding_key: jax.Array) -> Task:
    return sticky(
        length=fields.length,
        num_symbols=fields.num_symbols,
        d_x=fields.d_x,
        stay=fields.stay,
        embedding_key=embedding_key,
    )


TASKS = {
    "sticky": Entry(
        build=_build_sticky,
        causal=True,
        num_classes=lambda fields: fields.num_symbols,
        entropy_rate=lambda fields: markov.entropy_rate(
            transition_matrix(fields.num_symbols, fields.stay)
        ),
    ),
}
