"""The tasks a config can name, and how each is built from its `task` fields."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from jaxattn.tasks import markov
from jaxattn.tasks.base import Task
from jaxattn.tasks.sticky import sticky, transition_matrix
from jaxattn.tasks.toy import toy


class Entry(NamedTuple):
    """A task family, as functions of the `task` fields of a config."""

    build: Callable[[ConfigDict, jax.Array], Task]  # fields, embedding key -> task
    fields: tuple[str, ...]  # beside the name
    causal: bool  # whether a head may only look back
    learned: str  # the metric whose fall is what is learned: precision
    shown: str  # the sequence on which to look at that: "heldout" or "train"
    lag: int  # a position shows the symbol that was asked for so many before it
    positions: Callable[[ConfigDict], int]  # T
    num_classes: Callable[[ConfigDict], int]
    entropy_rate: Callable[[ConfigDict], float]  # nats
    note: str = ""  # for the top of a report


def _build_sticky(fields: ConfigDict, embedding_key: jax.Array) -> Task:
    return sticky(
        length=fields.length,
        num_symbols=fields.num_symbols,
        d_x=fields.d_x,
        stay=fields.stay,
        embedding_key=embedding_key,
    )


def _build_toy(fields: ConfigDict, embedding_key: jax.Array) -> Task:
    del embedding_key  # nothing but the sequences is random
    return toy(length=fields.length, num_classes=fields.num_classes, d_x=fields.d_x)


TASKS = {
    "sticky": Entry(
        build=_build_sticky,
        fields=("length", "num_symbols", "d_x", "stay", "embedding_seed"),
        causal=True,
        learned="heldout_kl",
        shown="heldout",
        lag=1,
        positions=lambda fields: fields.length - 1,
        num_classes=lambda fields: fields.num_symbols,
        entropy_rate=lambda fields: markov.entropy_rate(
            transition_matrix(fields.num_symbols, fields.stay)
        ),
    ),
    "toy": Entry(
        build=_build_toy,
        fields=("length", "num_classes", "d_x"),
        causal=False,
        # Nothing can be known of other sequences: what is learned is this one.
        learned="train_loss",
        shown="train",
        lag=0,
        positions=lambda fields: fields.length,
        num_classes=lambda fields: fields.num_classes,
        entropy_rate=lambda fields: math.log(fields.num_classes),
        note="Labels are random: exact Bayes is chance, whatever is learned is memory,"
        " and no held-out loss can be better than chance but by luck.",
    ),
}
