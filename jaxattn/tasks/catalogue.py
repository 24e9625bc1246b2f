"""The tasks a config can name, and how each is built from its `task` fields."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxattn.tasks import bijection, hmm, markov, recall
from jaxattn.tasks.base import Task
from jaxattn.tasks.sticky import sticky, transition_matrix
from jaxattn.tasks.toy import toy

Fields = ConfigDict | Mapping[str, Any]


class Keys(NamedTuple):
    """Which positions of a sequence show what a posterior is about."""

    first_token: int
    end_token: int  # the first behind those that count
    count: int  # so many of the first positions that show one of them


class Tunnel(NamedTuple):
    """What is asked of a task for transformers, as functions of its `task` fields."""

    num_tokens: Callable[[Fields], int]  # 0: inputs are vectors, of width `d_x`
    scored: Callable[[Fields], int]  # positions of each sequence with a weight
    position_name: str  # of these
    keys: Callable[[Fields], Keys]
    # log p of what a posterior is about, given tokens (T,); None: of the targets.
    log_beliefs: Callable[[Fields, jax.Array], jax.Array] | None = None
    # Which field makes sequences longer, if any can be without other rules.
    longer: str | None = None
    wrong: Callable[[Fields], tuple[str, str] | None] = lambda fields: None
    """Of fields that do not fit together: one of them, and what is allowed."""


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
    entropy_rate: Callable[[ConfigDict], float | None]  # nats; None: not known
    note: str = ""  # for the top of a report
    tunnel: Tunnel | None = None  # None: not for transformers
    one_head: bool = True  # whether one head can be trained on it


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
        tunnel=Tunnel(
            num_tokens=lambda fields: 0,
            scored=lambda fields: fields.length - 1,
            position_name="position",
            keys=lambda fields: Keys(0, 0, 0),
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
    "bijection": Entry(
        build=lambda fields, key: bijection.bijection(
            num_symbols=fields.num_symbols, num_pairs=fields.num_pairs
        ),
        fields=("num_symbols", "num_pairs"),
        causal=True,
        learned="heldout_kl",
        shown="heldout",
        lag=0,
        positions=lambda fields: bijection.num_positions(fields.num_pairs),
        num_classes=lambda fields: fields.num_symbols,
        # Each pair is scored alike: the mean of log(V - k + 1).
        entropy_rate=lambda fields: (
            sum(math.log(fields.num_symbols - k) for k in range(fields.num_pairs))
            / fields.num_pairs
        ),
        note="Entropy is a function of the position alone here: what is ordered by one"
        " is ordered by the other.",
        tunnel=Tunnel(
            num_tokens=lambda fields: bijection.num_tokens(fields.num_symbols),
            scored=lambda fields: fields.num_pairs,
            position_name="pair",
            keys=lambda fields: Keys(0, fields.num_symbols, fields.num_pairs),
            wrong=lambda fields: (
                ("num_pairs", f"at most num_symbols, {fields.num_symbols}")
                if fields.num_pairs > fields.num_symbols
                else None
            ),
        ),
        one_head=False,
    ),
    "hmm": Entry(
        build=lambda fields, key: hmm.hmm(
            num_states=fields.num_states,
            num_symbols=fields.num_symbols,
            num_observations=fields.num_observations,
        ),
        fields=("num_states", "num_symbols", "num_observations"),
        causal=True,
        learned="heldout_kl",
        shown="heldout",
        lag=0,
        positions=lambda fields: hmm.num_positions(
            fields.num_states, fields.num_symbols, fields.num_observations
        ),
        num_classes=lambda fields: fields.num_states,
        entropy_rate=lambda fields: None,  # every sequence has another
        note="Targets are exact beliefs about the hidden state: the loss is the"
        " cross-entropy to them.",
        tunnel=Tunnel(
            num_tokens=lambda fields: hmm.num_tokens(fields.num_symbols),
            scored=lambda fields: fields.num_observations,
            position_name="observation",
            keys=lambda fields: Keys(
                0,
                hmm.NUM_NUMBERS,
                hmm.header_length(fields.num_states, fields.num_symbols),
            ),
            longer="num_observations",
            wrong=lambda fields: next(
                (
                    (name, "at most 20: no probability is below a twentieth")
                    for name in ("num_states", "num_symbols")
                    if fields[name] * hmm.SMALLEST > 100
                ),
                None,
            ),
        ),
        one_head=False,
    ),
    "fixed_hmm": Entry(
        build=lambda fields, key: hmm.fixed_hmm(
            process=fields.process, length=fields.length
        ),
        fields=("process", "length"),
        causal=True,
        learned="heldout_kl",
        shown="heldout",
        lag=0,
        positions=lambda fields: fields.length,
        num_classes=lambda fields: len(hmm.PROCESSES[fields.process]),
        entropy_rate=lambda fields: None,  # not in closed form
        tunnel=Tunnel(
            num_tokens=lambda fields: len(hmm.PROCESSES[fields.process]),
            scored=lambda fields: fields.length,
            position_name="symbol",
            keys=lambda fields: Keys(
                0, len(hmm.PROCESSES[fields.process]), fields.length
            ),
            log_beliefs=lambda fields, tokens: hmm.log_beliefs(
                hmm.PROCESSES[fields.process], tokens
            ),
            longer="length",
        ),
        one_head=False,
    ),
    "recall": Entry(
        build=lambda fields, key: recall.recall(
            num_keys=fields.num_keys,
            num_values=fields.num_values,
            num_pairs=fields.num_pairs,
            num_queries=fields.num_queries,
            filler=fields.filler,
            novel=fields.novel,
        ),
        fields=(
            "num_keys",
            "num_values",
            "num_pairs",
            "num_queries",
            "filler",
            "novel",
        ),
        causal=True,
        learned="heldout_kl",
        shown="heldout",
        lag=0,
        positions=lambda fields: recall.num_positions(
            fields.num_pairs, fields.num_queries, fields.filler
        ),
        num_classes=lambda fields: fields.num_values,
        entropy_rate=lambda fields: fields.novel * math.log(fields.num_values),
        tunnel=Tunnel(
            num_tokens=lambda fields: recall.num_tokens(
                fields.num_keys, fields.num_values
            ),
            scored=lambda fields: fields.num_queries,
            position_name="query",
            keys=lambda fields: Keys(0, fields.num_keys, fields.num_pairs),
            longer="filler",
            wrong=lambda fields: (
                ("num_pairs", f"at most num_keys, {fields.num_keys}")
                if fields.num_pairs > fields.num_keys
                else ("novel", "0 where every key is shown")
                if fields.novel > 0 and fields.num_pairs == fields.num_keys
                else None
            ),
        ),
        one_head=False,
    ),
}
