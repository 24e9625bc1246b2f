"""A second, plain implementation of a head and its variants, on random problems.

The laws are compared with it, and it uses none of them. Every stage of the forward pass
can be shifted, so that one backward pass gives the gradient of the loss for all stages.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxattn.theory.attention import Params

DROPOUT_RATE = 0.3
EPSILON = 1e-5  # of the LayerNorm
RATE = 0.7  # η; the motions are linear in it

KINDS = (
    "ordinary",
    "masked rows",  # half of the rows are fully masked
    "zero weights",  # half of the positions have weight 0
    "no weights",  # all have
    "uniform",  # all scores are 0
    "one-hot",  # scores up to 1e4; pairs of sources nearly tie
    "tiny values",  # of size 1e-6
    "huge values",  # of size 1e6
)


class Shape(NamedTuple):
    """Sizes of a random problem."""

    queries: int
    sources: int
    d_x: int
    d_k: int
    d_v: int
    num_classes: int
    num_heads: int
    num_kv_heads: int


class Problem(NamedTuple):
    """Inputs and parameters of a random head and its variants, exact in float32."""

    inputs: jax.Array  # (T, d_x)
    sources: jax.Array  # (S, d_x), inputs of keys and values
    params: Params
    bias: jax.Array  # (1, S), added to the scores
    mask: jax.Array  # (T, S)
    own_mask: jax.Array  # (T, T), for self-attention
    targets: jax.Array  # (T,)
    weights: jax.Array  # (T,), of the positions
    keep: jax.Array  # (T, S), False where attention is dropped
    query_heads: jax.Array  # (T, H, d_k)
    key_heads: jax.Array  # (S, H_kv, d_k)
    value_heads: jax.Array  # (S, H_kv, d_v)
    w_o_heads: jax.Array  # (H d_v, C)
    w_stream: jax.Array  # (d_v, d_x), from the head into the residual stream
    w_read: jax.Array  # (d_x, C), from there to the logits
    direction: Params  # a random change of the parameters
    noise: jax.Array  # N(0, 1), as many as the largest stage has entries


class Stages(NamedTuple):
    """Stages of a forward pass, or the gradient of the loss for each."""

    inputs: jax.Array
    params: Params
    bias: jax.Array
    query: jax.Array
    key: jax.Array
    raw_value: jax.Array  # before the LayerNorm, if any
    value: jax.Array
    score: jax.Array
    weight: jax.Array
    context: jax.Array
    hidden: jax.Array  # after the residual, if any
    logit: jax.Array


class Outcome(NamedTuple):
    """Results of a forward pass that laws of motion are about."""

    score: jax.Array
    weight: jax.Array
    usage: jax.Array  # Σ_i a_ij
    context: jax.Array
    compatibility: jax.Array | None  # of fixed signals u, if given
    loss: jax.Array


class Signals(NamedTuple):
    """The stages of a forward pass, and autodiff's gradient of the loss for each."""

    at: Stages
    gradient: Stages


class Case(NamedTuple):
    """A problem, and the gradients by autodiff of each of its variants."""

    problem: Problem
    plain: Signals
    own: Signals  # self-attention: sources are the inputs
    causal: Signals  # the same under the causal mask, with equal weights of positions
    dropout: Signals
    norm: Signals
    residual: Signals
    heads: Signals
    advantage: jax.Array  # E[b] - b, of autodiff's b, of the plain variant
    spread: jax.Array  # √(var ṽ + ε) (S, 1), of the norm variant
    score_motion: jax.Array  # of gradient descent on the scores alone
    weight_motion: jax.Array  # the motion of the weights under it
    value_motion: jax.Array  # of gradient descent on the values alone


VARIANTS = ("plain", "own", "causal", "dropout", "norm", "residual", "heads")


def draw_problem(rng: np.random.Generator, shape: Shape, kind: str) -> Problem:
    """Draws a random problem.

    Args:
      rng: source of randomness.
      shape: sizes.
      kind: one of `KINDS`.

    Returns:
      Problem, in float64 with values that float32 holds exactly.
    """
    queries, sources, d_x, d_k, d_v, num_classes, num_heads, num_kv_heads = shape

    def normal(*size: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=size)).astype(np.float32).astype(np.float64)

    def chosen(*size: int, share: float = 0.7) -> np.ndarray:
        return rng.random(size) < share

    value_scale = {"tiny values": 1e-6, "huge values": 1e6}.get(kind, 1.0)
    # x W_Q W_Kᵀ xᵀ / √d_k has size d_x if all of them are N(0, 1).
    score_scale = {"uniform": 0.0, "one-hot": 3e3 / d_x}.get(kind, 1 / d_x)
    weights = np.abs(normal(queries))
    if kind in ("zero weights", "no weights"):
        weights *= chosen(queries, share=0.5 if kind == "zero weights" else 0)

    def paired(array: np.ndarray) -> np.ndarray:
        """Makes odd rows equal to those before, to 1e-4, but for the last column."""
        if kind != "one-hot":
            return array
        copy = array.copy()
        copy[1::2, ..., :-1] = copy[0 : len(array) - 1 : 2, ..., :-1]
        return (
            (copy + normal(*array.shape, scale=1e-4)).astype(np.float32).astype(float)
        )

    seeing = chosen(queries, 1, share=0.5 if kind == "masked rows" else 0.95)
    params = Params(
        w_q=normal(d_x, d_k, scale=score_scale),
        w_k=normal(d_x, d_k),
        w_v=normal(d_x, d_v, scale=value_scale),
        w_o=normal(d_v, num_classes),
        b_o=normal(num_classes),
    )
    if kind == "one-hot":
        # Paired sources differ in the last column, which values use and keys do not:
        # their scores tie, and their values differ.
        params.w_k[-1] = 0
    return Problem(
        inputs=paired(normal(queries, d_x)),
        sources=paired(normal(sources, d_x)),
        params=params,
        bias=normal(1, sources, scale=min(score_scale, 1)),
        mask=chosen(queries, sources) & seeing,
        own_mask=chosen(queries, queries) & seeing,
        targets=rng.integers(0, num_classes, queries),
        weights=weights,
        keep=chosen(queries, sources, share=1 - DROPOUT_RATE),
        query_heads=normal(queries, num_heads, d_k, scale=score_scale),
        key_heads=paired(normal(sources, num_kv_heads, d_k + 1))[..., :-1],
        value_heads=normal(sources, num_kv_heads, d_v, scale=value_scale),
        w_o_heads=normal(num_heads * d_v, num_classes),
        w_stream=normal(d_v, d_x),
        w_read=normal(d_x, num_classes),
        direction=jax.tree.map(lambda w: normal(*w.shape), params),
        noise=normal(
            (queries + d_x) * (sources + d_x) * num_heads
            + sum(w.size for w in params)
            + num_heads * (queries + sources) * (d_k + d_v + num_classes)
        ),
    )


def forward(
    problem: Problem,
    variant: str,
    shift: dict[str, chex.ArrayTree],
    upstream: jax.Array | None = None,
) -> tuple[Outcome, Stages]:
    """Computes the forward pass of a variant, with shifted stages.

    Args:
      problem: from `draw_problem`.
      variant: one of `VARIANTS`.
      shift: stage -> what is added to it before it is used further.
      upstream: fixed signals u, of `compatibility`.

    Returns:
      Outcome and stages. A stage that a variant does not have repeats the one before.
    """

    def shifted(name: str, computed: chex.ArrayTree) -> chex.ArrayTree:
        if name not in shift:
            return computed
        return jax.tree.map(jnp.add, computed, shift[name])

    own = variant in ("own", "causal", "residual")
    inputs = shifted("inputs", problem.inputs)
    params = shifted("params", problem.params)
    bias = shifted("bias", problem.bias)
    sources = inputs if own else problem.sources
    if variant == "heads":
        query = shifted("query", problem.query_heads)
        key = shifted("key", problem.key_heads)
        raw_value = value = shifted("value", problem.value_heads)
        uses = _uses(query.shape[1], key.shape[1], query.dtype)
        score = jnp.einsum("ihd,jrd,hr->hij", query, key, uses)
        mask = jnp.broadcast_to(problem.mask[None], score.shape)
    else:
        query = shifted("query", inputs @ params.w_q)
        key = shifted("key", sources @ params.w_k)
        raw_value = value = shifted("raw_value", sources @ params.w_v)
        if variant == "norm":
            centred = raw_value - jnp.mean(raw_value, axis=1, keepdims=True)
            value = centred / _spread(raw_value)
        value = shifted("value", value)
        score = jnp.einsum("id,jd->ij", query, key)
        mask = problem.own_mask if own else problem.mask
        if variant == "causal":
            mask = jnp.tri(len(inputs), dtype=bool)
    score = score / math.sqrt(key.shape[-1])
    if variant in ("plain", "dropout", "norm"):
        score = score + bias
    score = shifted("score", score)
    weight = shifted("weight", _softmax(score, mask))

    if variant == "heads":
        context = jnp.einsum("hij,jrd,hr->ihd", weight, value, uses)
    elif variant == "dropout":
        kept = problem.keep.astype(weight.dtype) / (1 - DROPOUT_RATE)
        context = jnp.einsum("ij,ij,jd->id", kept, weight, value)
    else:
        context = jnp.einsum("ij,jd->id", weight, value)
    hidden = context = shifted("context", context)
    if variant == "heads":
        logit = context.reshape(len(context), -1) @ problem.w_o_heads
    elif variant == "residual":
        hidden = shifted("hidden", inputs + context @ problem.w_stream)
        logit = hidden @ problem.w_read
    else:
        logit = context @ params.w_o + params.b_o[None]
    logit = shifted("logit", logit)

    nll = optax.softmax_cross_entropy_with_integer_labels(logit, problem.targets)
    counts = jnp.ones_like(nll) if variant == "causal" else problem.weights
    total = jnp.sum(counts)
    loss = jnp.vdot(counts, nll) / jnp.where(total > 0, total, 1)
    stages = Stages(
        inputs=inputs,
        params=params,
        bias=bias,
        query=query,
        key=key,
        raw_value=raw_value,
        value=value,
        score=score,
        weight=weight,
        context=context,
        hidden=hidden,
        logit=logit,
    )
    outcome = Outcome(
        score=score,
        weight=weight,
        usage=jnp.einsum("...ij->...j", weight),
        context=context,
        compatibility=(
            None if upstream is None else jnp.einsum("id,jd->ij", upstream, value)
        ),
        loss=loss,
    )
    return outcome, stages


def _softmax(score: jax.Array, mask: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.where(mask, score, -1e300), axis=-1, keepdims=True)
    # Masked scores are removed twice, or a large one would be inf * 0 in a gradient.
    grown = jnp.exp(jnp.where(mask, score - largest, 0)) * mask.astype(score.dtype)
    total = jnp.sum(grown, axis=-1, keepdims=True)
    return grown / jnp.where(total > 0, total, 1)


def _spread(raw_value: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.var(raw_value, axis=1, keepdims=True) + EPSILON)


def _uses(num_heads: int, num_kv_heads: int, dtype) -> jax.Array:
    """Which key-value head each query head uses, as 0 and 1 (H, H_kv)."""
    first = np.arange(num_heads)[:, None] * num_kv_heads // num_heads
    return jnp.asarray(first == np.arange(num_kv_heads)[None], dtype)


def _signals(problem: Problem, variant: str) -> Signals:
    _, at = forward(problem, variant, {})
    nowhere = jax.tree.map(jnp.zeros_like, at)._asdict()
    gradient = jax.grad(lambda shift: forward(problem, variant, shift)[0].loss)(nowhere)
    return Signals(at, Stages(**gradient))


def gather(problem: Problem) -> Case:
    """Computes all arguments of the laws by autodiff."""
    signals = {variant: _signals(problem, variant) for variant in VARIANTS}
    at, gradient = signals["plain"]
    expected = jnp.sum(at.weight * gradient.weight, axis=1, keepdims=True)
    score_motion = -RATE * gradient.score
    _, weight_motion = jax.jvp(
        lambda shift: forward(problem, "plain", {"score": shift})[0].weight,
        (jnp.zeros_like(score_motion),),
        (score_motion,),
    )
    return Case(
        problem,
        **signals,
        advantage=expected - gradient.weight,
        spread=_spread(signals["norm"].at.raw_value),
        score_motion=score_motion,
        weight_motion=weight_motion,
        value_motion=-RATE * gradient.value,
    )
