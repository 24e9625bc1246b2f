"""The algorithms that a config can name, each with its fields and how it is built."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jaxattn.algorithms.base import Algorithm, GradientFunction, MixFunction
from jaxattn.algorithms.descent import gradient, two_timescale, warm_up_cosine
from jaxattn.algorithms.em import ORDERS, em
from jaxattn.algorithms.layered_em import FixedModel, layered_em
from jaxattn.algorithms.roles import LAYER_ROLES, ROLES, by_role
from jaxattn.fields import BELOW_ONE, FLAG, RATE, SHARE, Field, Fields, integer, one_of
from jaxattn.theory import m_steps
from jaxattn.theory.m_steps import MStep

Arm = Mapping[str, Any]  # fields of an arm
Rates = Mapping[str, Any]  # numbers, possibly traced


class HeadModel(NamedTuple):
    """Parts of one head that an algorithm is built from."""

    loss_and_gradient: GradientFunction  # of one sequence
    mix: MixFunction  # (q, k, v) -> a v of one sequence
    steps: int  # of the whole run, which a rate may depend on


class LayeredModel(NamedTuple):
    """Parts of a model of several layers that an algorithm is built from."""

    loss_and_gradient: GradientFunction  # of a whole batch
    fixed: FixedModel  # for models with attention only
    steps: int  # of the whole run


def _nothing(arm: Arm) -> Fields:
    """Returns no fields."""
    return {}


def _fits(arm: Arm) -> tuple[str, str] | None:
    """Returns None: any fields fit layers."""
    return None


class AlgorithmSpec(NamedTuple):
    """An algorithm that a config can name, as functions of the fields of an arm.

    The first three are given fields that may still be wrong; `head` and `layers` fields
    that shape the compiled program, and rates that may be traced.
    """

    about: str
    rates: Callable[[Arm], Fields]  # may be traced; {} while others are wrong
    head: Callable[[Arm, Rates, HeadModel], Algorithm] | None = None
    layers: Callable[[Arm, Rates, LayeredModel], Algorithm] | None = None
    static: Callable[[Arm], Fields] = _nothing  # shape the compiled program
    optional: Callable[[Arm], Fields] = _nothing  # the same, may be left out
    # Of fields that do not fit layers: one of them, and what it must be.
    wrong_in_layers: Callable[[Arm], tuple[str, str] | None] = _fits
    fixes_attention: bool = False  # for models with attention only
    splits_by_ratio: bool = False  # on a grid: SGD, fast values and fast routing


# Of a head while it trains, or of every head of a transformer.
_WIRING: Fields = {"value_norm": FLAG, "dropout_rate": BELOW_ONE}

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
}


class Scheduled(NamedTuple):
    """An optimizer whose rate follows a schedule over the whole run."""

    build: Callable[[Arm, Rates, int], optax.GradientTransformation]
    rates: Fields
    optional: Fields


def _adamw(arm: Arm, rates: Rates, steps: int) -> optax.GradientTransformation:
    share = warm_up_cosine(arm.get("warm_up", 0.0), steps)
    return optax.adamw(
        lambda count: rates["learning_rate"] * share(count.astype(jnp.float32)),
        weight_decay=rates["weight_decay"],
    )


SCHEDULED = {
    "adamw": Scheduled(
        _adamw, {"learning_rate": RATE, "weight_decay": RATE}, {"warm_up": BELOW_ONE}
    )
}


# --- one optimizer for everything

_OPTIMIZER = one_of((*OPTIMIZERS, *SCHEDULED))


def _scheduled(arm: Arm) -> Scheduled | None:
    name = arm.get("optimizer")
    return SCHEDULED.get(name) if isinstance(name, str) else None


def _gradient_rates(arm: Arm) -> Fields:
    if not _OPTIMIZER.accepts(arm.get("optimizer")):
        return {}
    scheduled = _scheduled(arm)
    return scheduled.rates if scheduled else {"learning_rate": RATE}


def _gradient_optional(arm: Arm) -> Fields:
    scheduled = _scheduled(arm)
    return {**_WIRING, **(scheduled.optional if scheduled else {})}


def _optimizer(arm: Arm, rates: Rates, steps: int) -> optax.GradientTransformation:
    scheduled = _scheduled(arm)
    if scheduled:
        return scheduled.build(arm, rates, steps)
    return OPTIMIZERS[arm["optimizer"]](rates["learning_rate"])


def _gradient_head(arm: Arm, rates: Rates, model: HeadModel) -> Algorithm:
    return gradient(_optimizer(arm, rates, model.steps), model.loss_and_gradient)


def _gradient_layers(arm: Arm, rates: Rates, model: LayeredModel) -> Algorithm:
    tx = _optimizer(arm, rates, model.steps)
    return gradient(tx, model.loss_and_gradient, whole_batch=True)


# --- a rate for each role


def _three_rates(arm: Arm) -> Fields:
    return dict.fromkeys(("routing_rate", "value_rate", "output_rate"), RATE)


def _two_timescale_head(arm: Arm, rates: Rates, model: HeadModel) -> Algorithm:
    return two_timescale(
        **rates, loss_and_gradient=model.loss_and_gradient, roles=ROLES
    )


def _two_timescale_layers(arm: Arm, rates: Rates, model: LayeredModel) -> Algorithm:
    return two_timescale(
        **rates,
        loss_and_gradient=model.loss_and_gradient,
        roles=LAYER_ROLES,
        whole_batch=True,
    )


# --- EM


class MStepSpec(NamedTuple):
    """An M-step that a config can name."""

    rule: Callable[..., MStep]  # of its rates, in their order
    rates: Fields
    layers: bool = False  # whether it is also for models of several layers


M_STEPS = {
    "gradient": MStepSpec(m_steps.gradient, {"value_rate": RATE}, layers=True),
    "prototype": MStepSpec(m_steps.prototype, {"value_rate": RATE, "ridge": RATE}),
    "majorised": MStepSpec(
        m_steps.majorised, {"ridge": RATE, "damping": SHARE, "statistics_rate": SHARE}
    ),
}
_EM_STATIC: dict[str, Field] = {
    "optimizer": one_of(OPTIMIZERS),
    "m_step": one_of(M_STEPS),
    "order": one_of(ORDERS),
    "inner_steps": integer(1, 1000),
}


def _em_static(arm: Arm) -> Fields:
    return _EM_STATIC


def _em_rates(arm: Arm) -> Fields:
    if not _EM_STATIC["m_step"].accepts(arm.get("m_step")):
        return {}
    own = M_STEPS[arm["m_step"]].rates
    return {"routing_rate": RATE, "output_rate": RATE, **own}


def _frame(
    arm: Arm, rates: Rates, rest: tuple[str, ...], roles: tuple[str, ...]
) -> optax.GradientTransformation:
    """Returns what moves everything but the values."""
    optimizer = OPTIMIZERS[arm["optimizer"]]
    parts = {
        ("query", "key"): optimizer(rates["routing_rate"]),
        rest: optimizer(rates["output_rate"]),
    }
    return by_role(parts, still=("value",), roles=roles)


def _em_head(arm: Arm, rates: Rates, model: HeadModel) -> Algorithm:
    own = M_STEPS[arm["m_step"]]
    return em(
        own.rule(*(rates[name] for name in own.rates)),
        _frame(arm, rates, ("output",), ROLES),
        order=arm["order"],
        inner_steps=arm["inner_steps"],
        mix=model.mix,
        loss_and_gradient=model.loss_and_gradient,
    )


def _em_layers(arm: Arm, rates: Rates, model: LayeredModel) -> Algorithm:
    return layered_em(
        model.fixed,
        _frame(arm, rates, ("output", "mlp", "embed"), LAYER_ROLES),
        model.loss_and_gradient,
        value_rate=rates["value_rate"],
        order=arm["order"],
        inner_steps=arm["inner_steps"],
    )


def _em_wrong_in_layers(arm: Arm) -> tuple[str, str] | None:
    allowed = [name for name, own in M_STEPS.items() if own.layers]
    return None if arm["m_step"] in allowed else ("m_step", " or ".join(allowed))


SPECS: Mapping[str, AlgorithmSpec] = MappingProxyType(
    {
        "gradient": AlgorithmSpec(
            about="one optimizer moves everything",
            static=lambda arm: {"optimizer": _OPTIMIZER},
            optional=_gradient_optional,
            rates=_gradient_rates,
            head=_gradient_head,
            layers=_gradient_layers,
        ),
        "two_timescale": AlgorithmSpec(
            about="one rate each for routing (queries, keys), values and output",
            optional=lambda arm: _WIRING,
            rates=_three_rates,
            head=_two_timescale_head,
            layers=_two_timescale_layers,
            splits_by_ratio=True,
        ),
        "em": AlgorithmSpec(
            about="an M-step moves the values at fixed attention, then all else moves",
            static=_em_static,
            rates=_em_rates,
            head=_em_head,
            layers=_em_layers,
            wrong_in_layers=_em_wrong_in_layers,
            fixes_attention=True,
        ),
    }
)


def on_grid(
    rates: Mapping[str, np.ndarray], scale: np.ndarray, ratio: np.ndarray
) -> dict[str, np.ndarray]:
    """Computes the rates of an arm at points of a grid.

    Learning rates times scale, the values' times ratio as well. An M-step in closed
    form has no rate: there the ridge, which slows the values down, is divided by it.

    Args:
      rates: name -> value.
      scale: (P,).
      ratio: (P,), η_V / η_QK where the arm's own rates are equal.

    Returns:
      name -> (P,).
    """
    factors = dict.fromkeys(("learning_rate", "routing_rate", "output_rate"), scale)
    factors["value_rate"] = scale * ratio
    if "value_rate" not in rates:
        factors["ridge"] = 1 / ratio
    one = np.ones(scale.shape, scale.dtype)
    return {name: rate * factors.get(name, one) for name, rate in rates.items()}
