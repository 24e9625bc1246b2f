"""Associative recall: look up the value that was shown with a key.

Distinct keys with random values are shown, k v k v ..., then values of keys are asked
for, with meaningless fillers anywhere between. Exact Bayes is certain of the value of a
key that was shown, and uniform for one that was not. No value asked for is shown
afterwards, so that later queries gain nothing from earlier ones.

Tokens, in this order: num_keys keys, num_values values, NUM_FILLERS fillers, and one
marker, which stands once, between the last pair and the first query: a key before it
belongs to a pair, a key after it is a query. A sequence of two pairs, two queries and
three fillers may read

    k5 v1  f0  k2 v7  f3  marker  k2  f0  k5        asks for v7 at k2, for v1 at k5

The order of pairs, marker and queries is fixed, and all placements of the fillers
between them, before the first and after the last are equally likely; none separates a
pair.

Source: associative recall goes back to arXiv 1610.06258; exact posteriors as in the
wind tunnels of arXiv 2512.22471.
"""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.fields import integer, number
from jaxattn.tasks.base import (
    Batch,
    Keys,
    Task,
    TaskFields,
    TaskSpec,
    TransformerSpec,
    require_probability,
)
from jaxattn.theory.sizes import check_size

NUM_FILLERS = 4  # kinds, not places


def num_tokens(num_keys: int, num_values: int) -> int:
    """Size of the vocabulary: keys, values, fillers, the marker."""
    return num_keys + num_values + NUM_FILLERS + 1


def num_positions(num_pairs: int, num_queries: int, filler: int) -> int:
    """T: two positions a pair, one for the marker, each query and each filler."""
    return 2 * num_pairs + 1 + num_queries + filler


def recall(
    *,
    num_keys: int,
    num_values: int,
    num_pairs: int,
    num_queries: int,
    filler: int,
    novel: float,
) -> Task:
    """Returns the task, with keys, values and fillers drawn for each sequence.

    A query is with probability `novel` a key that was not shown, else one that was,
    uniformly and independently of the other queries. Every key has a value, uniform and
    independent of all others, shown or not: the target of a query for it.

    Args:
      num_keys: kinds of keys.
      num_values: V, kinds of values, at least 2; also the number of classes.
      num_pairs: pairs shown, from 1 to num_keys.
      num_queries: queries, at least 1.
      filler: how many fillers stand between them, at least 0.
      novel: probability that a query was not shown, in [0, 1]; 0 if all keys are shown.

    Returns:
      Task; targets are values' classes 0..V-1. Impossible is all that is never drawn:
      a key shown twice, with one value or two, a separated pair, a value alone or after
      the marker, the marker before the last pair or twice, pairs, queries or fillers
      beyond their number, a query that was shown at novel = 1 or was not at novel = 0,
      a token outside the vocabulary.

    Raises:
      ValueError: a number out of range.
    """
    for name, count, least in (
        ("num_keys", num_keys, 1),
        ("num_values", num_values, 2),
        ("num_queries", num_queries, 1),
        ("filler", filler, 0),
    ):
        check_size(name, count, least)
    check_size("num_pairs", num_pairs, 1, num_keys)  # keys are distinct
    require_probability("novel", novel)
    if novel > 0 and num_pairs == num_keys:
        raise ValueError(f"novel={novel!r}: must be 0 where every key is shown")
    length = num_positions(num_pairs, num_queries, filler)
    first_value, first_filler = num_keys, num_keys + num_values
    marker = first_filler + NUM_FILLERS

    def sample(key: jax.Array) -> Batch:
        order_key, value_key, query_key, novel_key, filler_key, place_key = (
            jax.random.split(key, 6)
        )
        keys = jax.random.permutation(order_key, num_keys)  # those shown come first
        values = jax.random.randint(value_key, (num_keys,), 0, num_values)
        is_novel = jax.random.bernoulli(novel_key, novel, (num_queries,))
        queries = jax.random.randint(
            query_key,
            (num_queries,),
            jnp.where(is_novel, num_pairs, 0),
            jnp.where(is_novel, num_keys, num_pairs),
        )

        # Pairs, the marker and queries are units: they occupy some of the slots, in
        # order, and fillers the others. Each earlier pair adds one position.
        num_units = num_pairs + 1 + num_queries
        slot = jax.random.permutation(place_key, num_units + filler)[:num_units]
        place = jnp.sort(slot) + np.minimum(np.arange(num_units), num_pairs)
        pair_place, marker_place, query_place = jnp.split(
            place, [num_pairs, num_pairs + 1]
        )

        fillers = jax.random.randint(filler_key, (length,), first_filler, marker)
        tokens = fillers.at[pair_place].set(keys[:num_pairs])
        tokens = tokens.at[pair_place + 1].set(first_value + values[keys[:num_pairs]])
        tokens = tokens.at[marker_place].set(marker)
        tokens = tokens.at[query_place].set(keys[queries])
        targets = jnp.zeros_like(tokens).at[query_place].set(values[keys[queries]])
        weights = jnp.zeros((length,), jnp.float32).at[query_place].set(1)
        return Batch(tokens.astype(jnp.int32), targets.astype(jnp.int32), weights)

    def bayes(batch: Batch) -> jax.Array:
        tokens = batch.inputs
        chex.assert_shape(tokens, (length,))
        position = jnp.arange(length, dtype=jnp.int32)
        is_key = (tokens >= 0) & (tokens < first_value)
        is_value = (tokens >= first_value) & (tokens < first_filler)
        is_filler = (tokens >= first_filler) & (tokens < marker)
        is_marker = tokens == marker
        asking = (jnp.cumsum(is_marker) > 0) & ~is_marker
        in_pair, is_query = is_key & ~asking, is_key & asking
        value_due = jnp.concatenate([jnp.zeros((1,), bool), in_pair[:-1]])

        # Where each key was first shown, and with which value.
        shown_at = jnp.full((num_keys,), length, jnp.int32)
        shown_at = shown_at.at[jnp.where(in_pair, tokens, num_keys)].min(
            position, mode="drop"
        )
        shown_at = shown_at[jnp.clip(tokens, 0, num_keys - 1)]
        was_shown = shown_at < position
        value = tokens[jnp.minimum(shown_at + 1, length - 1)] - first_value

        impossible = (
            ~(is_key | is_value | is_filler | is_marker)
            | (is_value != value_due)
            | (in_pair & was_shown)
            | (is_marker & (jnp.cumsum(in_pair) != num_pairs))
            | (jnp.cumsum(is_marker) > 1)
            | (jnp.cumsum(in_pair) > num_pairs)
            | (jnp.cumsum(is_query) > num_queries)
            | (jnp.cumsum(is_filler) > filler)
        )
        if novel in (0, 1):
            impossible |= is_query & (was_shown == bool(novel))
        certain = value[:, None] == jnp.arange(num_values, dtype=value.dtype)[None]
        log_p = jnp.where(
            (is_query & was_shown)[:, None],
            jnp.where(certain, 0.0, -jnp.inf),
            -np.log(num_values),
        )
        return jnp.where(jnp.cumsum(impossible)[:, None] > 0, jnp.nan, log_p)

    return Task(sample, bayes)


def _wrong(fields: TaskFields) -> tuple[str, str] | None:
    """Returns a field that does not fit the others, and what it must be."""
    if fields["num_pairs"] > fields["num_keys"]:
        return "num_pairs", f"at most num_keys, {fields['num_keys']}"
    if fields["novel"] > 0 and fields["num_pairs"] == fields["num_keys"]:
        return "novel", "0 where every key is shown"
    return None


SPEC = TaskSpec(
    build=lambda fields, _: recall(
        num_keys=fields["num_keys"],
        num_values=fields["num_values"],
        num_pairs=fields["num_pairs"],
        num_queries=fields["num_queries"],
        filler=fields["filler"],
        novel=fields["novel"],
    ),
    fields={
        "num_keys": integer(1, 100_000),
        "num_values": integer(2, 1000),
        "num_pairs": integer(1, 100_000),
        "num_queries": integer(1, 100_000),
        "filler": integer(0, 1_000_000),
        "novel": number(0, 1),
    },
    positions=lambda fields: num_positions(
        fields["num_pairs"], fields["num_queries"], fields["filler"]
    ),
    num_classes=lambda fields: fields["num_values"],
    entropy_rate=lambda fields: fields["novel"] * math.log(fields["num_values"]),
    head=False,
    transformer=TransformerSpec(
        num_tokens=lambda fields: num_tokens(fields["num_keys"], fields["num_values"]),
        scored=lambda fields: fields["num_queries"],
        position_name="query",
        keys=lambda fields: Keys(0, fields["num_keys"], fields["num_pairs"]),
        longer="filler",
        wrong=_wrong,
    ),
)
