"""Each law as a claim: the derivative that it should equal.

Arguments of a law come from autodiff, not from other laws, so that a wrong law is named
alone.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.proof import reference
from jaxattn.proof.reference import RATE, Case, Stages
from jaxattn.theory import attention, laws, losses
from jaxattn.theory.attention import Params

Tree = chex.ArrayTree
# A function of a case, a variant's stages, and the gradients of the loss for them.
Rule = Callable[[Case, Stages, Stages], Tree]


class Gradient(NamedTuple):
    """A claim to be the gradient of the loss for some coordinates of the head."""

    by_hand: Rule
    variant: str
    # Shift of the stages for a direction in these coordinates; linear in it.
    push: Callable[[Case, Tree], dict[str, Tree]]
    like: Rule  # the coordinates, or an array of their shape and typical size
    terms: Rule | None = None  # see `terms`
    of_scores: bool = False  # see `conditioning`


class Motion(NamedTuple):
    """A claim to be the first-order change of an outcome when stages are shifted."""

    by_hand: Rule
    variant: str
    output: str  # of `reference.Outcome`
    shift: Rule  # returns stage -> what is added to it
    terms: Rule | None = None  # see `terms`
    of_scores: bool = False  # see `conditioning`


def claim(law: Gradient | Motion, case: Case) -> Tree:
    """Evaluates a law on a case."""
    return law.by_hand(case, *getattr(case, law.variant))


def terms(law: Gradient | Motion, case: Case) -> Tree:
    """Computes the sizes of the terms that a law sums.

    A law without subtraction gives them itself, on absolute values; one that subtracts
    has a rule.
    """
    sizes = jax.tree.map(jnp.abs, case)
    return (law.terms or law.by_hand)(sizes, *getattr(sizes, law.variant))


def conditioning(law: Gradient | Motion, case: Case) -> jax.Array:
    """Factor of a law's allowed error, by the conditioning of its arguments.

    The largest score, at least 1, for a law that computes weights from scores: a score
    of size s is known to s ε, and so is its weight, relatively. 1 for all others.
    """
    if not law.of_scores:
        return jnp.ones(())
    return jnp.maximum(1.0, jnp.max(jnp.abs(getattr(case, law.variant).at.score)))


def _of(
    stage: str,
    by_hand: Rule,
    variant: str = "plain",
    terms: Rule | None = None,
    of_scores: bool = False,
) -> Gradient:
    """Claims the gradient of the loss for a stage."""
    return Gradient(
        by_hand,
        variant,
        push=lambda c, direction: {stage: direction},
        like=lambda c, at, dl: getattr(at, stage),
        terms=terms,
        of_scores=of_scores,
    )


def _move(
    output: str, by_hand: Rule, terms: Rule | None = None, **shift: Rule
) -> Motion:
    """Claims the change of an outcome when stages are shifted."""
    return Motion(
        by_hand,
        "plain",
        output,
        shift=lambda *case: {name: rule(*case) for name, rule in shift.items()},
        terms=terms,
    )


def _descent(stage: str) -> Motion:
    """Claims the change of the loss by gradient descent on one stage."""
    return _move(
        "loss",
        lambda c, at, dl: laws.descent_loss_change(getattr(dl, stage), RATE),
        **{
            stage: lambda c, at, dl: jax.tree.map(
                lambda g: -RATE * g, getattr(dl, stage)
            )
        },
    )


# --- parts of claims


def _projections(inputs: jax.Array, sources: jax.Array, at: Stages, dl: Stages):
    return Params(
        w_q=laws.projection_gradient(inputs, dl.query),
        w_k=laws.projection_gradient(sources, dl.key),
        w_v=laws.projection_gradient(sources, dl.raw_value),
        w_o=laws.projection_gradient(at.context, dl.logit),
        b_o=laws.output_bias_gradient(dl.logit),
    )


def _by_head(law: Callable, of_head: jax.Array, per_head: jax.Array) -> jax.Array:
    """Maps a law of (T, S) and (N, d) arrays over (H, T, S) and (N, H, d)."""
    return jax.vmap(law, in_axes=(0, 1), out_axes=1)(of_head, per_head)


def _shared(at: Stages, per_head: jax.Array) -> jax.Array:
    return laws.group_gradient(per_head, at.key.shape[1])


def _repeated(at: Stages, shared: jax.Array) -> jax.Array:
    return attention.repeat_heads(shared, at.query.shape[1])


def _head_score_gradient(c: Case, at: Stages, dl: Stages) -> jax.Array:
    upstream = laws.upstream_gradient(dl.logit, c.problem.w_o_heads)
    upstream = attention.split_heads(upstream, at.query.shape[1])

    def one(weight: jax.Array, upstream: jax.Array, value: jax.Array) -> jax.Array:
        worth = laws.compatibility(upstream, value)
        return laws.score_gradient(weight, laws.advantage(weight, worth))

    value = _repeated(at, at.value)
    return jax.vmap(one, in_axes=(0, 1, 1))(at.weight, upstream, value)


def _dropout_score_gradient(c: Case, at: Stages, dl: Stages) -> jax.Array:
    worth = laws.compatibility(dl.context, at.value)
    worth = laws.drop(worth, c.problem.keep, reference.DROPOUT_RATE)
    return laws.score_gradient(at.weight, laws.advantage(at.weight, worth))


def _loss_and_gradient(c: Case, at: Stages, dl: Stages) -> Params:
    p = c.problem
    _, gradient = laws.loss_and_gradient(
        p.params, p.inputs, p.targets, p.own_mask, p.weights
    )
    return gradient


def _causal_loss_and_gradient(c: Case, at: Stages, dl: Stages) -> Params:
    p = c.problem
    mask = attention.causal_mask(len(p.inputs))
    return laws.loss_and_gradient(p.params, p.inputs, p.targets, mask)[1]


def _scaled_attention(c: Case, strength: jax.Array) -> dict[str, jax.Array]:
    """Scales all weights of a query."""
    return {"weight": strength[:, None] * c.plain.at.weight}


def _moved_attention(c: Case, removed: jax.Array) -> dict[str, jax.Array]:
    """Removes attention from sources, and shares it out by the old weights."""
    shared = jnp.sum(removed, axis=1, keepdims=True) * c.plain.at.weight
    return {"weight": shared - removed}


def _per_use(at: Stages) -> jax.Array:
    """1 / N_j (S, 1), and 0 for a source whose usage is below the range of float32."""
    usage = jnp.einsum("ij->j", at.weight)[:, None]
    used = usage > 1e-30
    return jnp.where(used, 1 / jnp.where(used, usage, 1), 0)


# --- sizes of the terms of laws that subtract, on a case of absolute values


def _spread(weight: jax.Array, worth: jax.Array) -> jax.Array:
    """|E[b]| + |b|, the two sides of an advantage."""
    return jnp.sum(weight * worth, axis=-1, keepdims=True) + worth


def _score_terms(c: Case, at: Stages, dl: Stages) -> jax.Array:
    return at.weight * _spread(at.weight, dl.context @ at.value.T)


def _head_score_terms(c: Case, at: Stages, dl: Stages) -> jax.Array:
    worth = jnp.einsum("ihd,jhd->hij", dl.context, _repeated(at, at.value))
    return at.weight * _spread(at.weight, worth)


def _norm_terms(c: Case, at: Stages, dl: Stages) -> jax.Array:
    gradient, normed = dl.value, at.value
    along = normed * jnp.mean(gradient * normed, axis=1, keepdims=True)
    terms = gradient + jnp.mean(gradient, axis=1, keepdims=True) + along
    # Where a value hardly varies the LayerNorm magnifies its rounding.
    return terms / c.spread * (1 + at.raw_value / c.spread)


def _logit_terms(c: Case, at: Stages, dl: Stages) -> jax.Array:
    share = losses.position_shares(c.problem.weights, len(at.logit), at.logit.dtype)
    return jnp.broadcast_to(share[:, None], at.logit.shape)


def _loss_and_gradient_terms(c: Case, at: Stages, dl: Stages) -> Params:
    score = _score_terms(c, at, dl)
    scale = 1 / math.sqrt(at.key.shape[1])
    sizes = dl._replace(query=score @ at.key * scale, key=score.T @ at.query * scale)
    return _projections(at.inputs, at.inputs, at, sizes)


# --- the laws

LAWS: dict[str, Gradient | Motion] = {
    # The forward pass, as a derivative.
    "scores": _move(
        "score",
        lambda c, at, dl: attention.scores(at.query, at.key, at.bias),
        key=lambda c, at, dl: at.key,
        bias=lambda c, at, dl: at.bias,
    ),
    "weights": _move(
        "context",
        lambda c, at, dl: attention.weights(at.score, c.problem.mask) @ at.value,
        value=lambda c, at, dl: at.value,
        terms=lambda c, at, dl: at.weight @ at.value,
    )._replace(of_scores=True),
    # Signals.
    "logit_gradient": _of(
        "logit",
        lambda c, at, dl: laws.logit_gradient(
            at.logit, c.problem.targets, c.problem.weights
        ),
        terms=_logit_terms,
    ),
    "upstream_gradient": _of(
        "context",
        lambda c, at, dl: laws.upstream_gradient(dl.logit, c.problem.params.w_o),
    ),
    "compatibility": _of(
        "weight", lambda c, at, dl: laws.compatibility(dl.context, at.value)
    ),
    "expected_compatibility": Gradient(
        lambda c, at, dl: laws.expected_compatibility(dl.context, at.context),
        "plain",
        push=_scaled_attention,
        like=lambda c, at, dl: jnp.ones_like(at.context[:, 0]),
    ),
    "advantage": Gradient(
        lambda c, at, dl: laws.advantage(at.weight, dl.weight),
        "plain",
        push=_moved_attention,
        like=lambda c, at, dl: jnp.ones_like(at.weight),
        terms=lambda c, at, dl: _spread(at.weight, dl.weight),
    ),
    # Gradients.
    "score_gradient": _of(
        "score",
        lambda c, at, dl: laws.score_gradient(at.weight, c.advantage),
        terms=_score_terms,
    ),
    "value_gradient": _of(
        "value", lambda c, at, dl: laws.value_gradient(at.weight, dl.context)
    ),
    "query_gradient": _of(
        "query", lambda c, at, dl: laws.query_gradient(dl.score, at.key)
    ),
    "key_gradient": _of("key", lambda c, at, dl: laws.key_gradient(dl.score, at.query)),
    "projection_gradient": _of(
        "params",
        lambda c, at, dl: _projections(at.inputs, c.problem.sources, at, dl),
    ),
    "output_bias_gradient": Gradient(
        lambda c, at, dl: laws.output_bias_gradient(dl.logit),
        "plain",
        push=lambda c, b_o: {
            "params": jax.tree.map(jnp.zeros_like, c.problem.params)._replace(b_o=b_o)
        },
        like=lambda c, at, dl: c.problem.params.b_o,
    ),
    "input_gradient": _of(
        "inputs",
        lambda c, at, dl: laws.input_gradient(at.params, dl.query, dl.key, dl.value),
        "own",
    ),
    # Responsibilities.
    "column_usage": _move(
        "usage",
        lambda c, at, dl: laws.column_usage(at.weight),
        weight=lambda c, at, dl: at.weight,
    ),
    "prototype_signal": Gradient(
        lambda c, at, dl: jnp.where(
            _per_use(at) > 0, laws.prototype_signal(at.weight, dl.context), 0
        ),
        "plain",
        push=lambda c, direction: {"value": direction * _per_use(c.plain.at)},
        like=lambda c, at, dl: at.value,
    ),
    "overlap_kernel": _move(
        "context",
        lambda c, at, dl: -RATE * laws.overlap_kernel(at.weight) @ dl.context,
        value=lambda c, at, dl: c.value_motion,
        terms=lambda c, at, dl: at.weight @ c.value_motion,
    ),
    # Motion.
    "score_motion": _of(
        "score",
        lambda c, at, dl: laws.score_motion(at.weight, c.advantage, RATE) / -RATE,
        terms=_score_terms,
    ),
    "weight_motion": _move(
        "weight",
        lambda c, at, dl: laws.weight_motion(at.weight, c.score_motion),
        score=lambda c, at, dl: c.score_motion,
        terms=lambda c, at, dl: at.weight * _spread(at.weight, c.score_motion),
    ),
    "value_motion": _of(
        "value",
        lambda c, at, dl: laws.value_motion(at.weight, dl.context, RATE) / -RATE,
        terms=lambda c, at, dl: dl.value,
    ),
    "compatibility_motion": _move(
        "compatibility",
        lambda c, at, dl: laws.compatibility_motion(dl.context, c.value_motion),
        value=lambda c, at, dl: c.value_motion,
    ),
    "routing_motion": _move(
        "context",
        lambda c, at, dl: laws.routing_motion(c.weight_motion, at.value),
        score=lambda c, at, dl: c.score_motion,
    ),
    "content_motion": _move(
        "context",
        lambda c, at, dl: laws.content_motion(at.weight, c.value_motion),
        value=lambda c, at, dl: c.value_motion,
    ),
    "context_motion": _move(
        "context",
        lambda c, at, dl: laws.context_motion(
            at.weight, c.weight_motion, at.value, c.value_motion
        ),
        score=lambda c, at, dl: c.score_motion,
        value=lambda c, at, dl: c.value_motion,
    ),
    "loss_change": _move(
        "loss",
        lambda c, at, dl: laws.loss_change(dl.params, c.problem.direction),
        params=lambda c, at, dl: c.problem.direction,
    ),
    "descent_loss_change, scores": _descent("score"),
    "descent_loss_change, values": _descent("value"),
    "descent_loss_change, params": _descent("params"),
    # Variants of the head.
    "score_gradient, dropout": _of(
        "score",
        _dropout_score_gradient,
        "dropout",
        terms=_score_terms,
    ),
    "value_gradient, dropout": _of(
        "value",
        lambda c, at, dl: laws.value_gradient(
            laws.drop(at.weight, c.problem.keep, reference.DROPOUT_RATE), dl.context
        ),
        "dropout",
    ),
    "layer_norm_gradient": _of(
        "raw_value",
        lambda c, at, dl: laws.layer_norm_gradient(
            at.raw_value, dl.value, reference.EPSILON
        ),
        "norm",
        terms=_norm_terms,
    ),
    "score_bias_gradient": _of(
        "bias", lambda c, at, dl: laws.score_bias_gradient(dl.score, at.bias.shape)
    ),
    "residual_gradient": _of(
        "inputs",
        lambda c, at, dl: laws.residual_gradient(
            laws.input_gradient(at.params, dl.query, dl.key, dl.value), dl.hidden
        ),
        "residual",
    ),
    "score_gradient, heads": _of(
        "score", _head_score_gradient, "heads", terms=_head_score_terms
    ),
    "query_gradient, heads": _of(
        "query",
        lambda c, at, dl: _by_head(
            laws.query_gradient, dl.score, _repeated(at, at.key)
        ),
        "heads",
    ),
    "key_gradient, heads": _of(
        "key",
        lambda c, at, dl: _shared(at, _by_head(laws.key_gradient, dl.score, at.query)),
        "heads",
    ),
    "value_gradient, heads": _of(
        "value",
        lambda c, at, dl: _shared(
            at, _by_head(laws.value_gradient, at.weight, dl.context)
        ),
        "heads",
    ),
    # All at once, in one block; several blocks, and the loss, have tests of their own.
    "loss_and_gradient": _of(
        "params", _loss_and_gradient, "own", _loss_and_gradient_terms, of_scores=True
    ),
    "loss_and_gradient, causal": _of(
        "params",
        _causal_loss_and_gradient,
        "causal",
        _loss_and_gradient_terms,
        of_scores=True,
    ),
}
