"""The proof of the laws, resolved from a config."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxattn.algorithms import Algorithm, HeadModel, gradients
from jaxattn.algorithms.base import GradientFunction
from jaxattn.experiments import head
from jaxattn.experiments import kind as kinds
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.experiment import Problem, stream
from jaxattn.experiments.sequences import Sequences
from jaxattn.fields import ConfigError, Field, Fields, integer, number
from jaxattn.tasks import Batch
from jaxattn.theory.attention import Params

FIELDS: dict[str, Field] = {
    "seeds": integer(1, 100_000),
    "seed": head.FIELDS["seed"],
    "shapes": integer(1, 1000),
    "longest": integer(3, 1000),
    "widest": integer(3, 1000),
    "bounds.float64": number(0, 1),
    "bounds.float32": number(0, 1),
    "bounds.difference": number(0, 1),
    "slopes.problems": integer(1, 100_000),
    "slopes.decades": number(4, 12),
    "slopes.rates": integer(2, 10_000),
    "slopes.tolerance": number(0, 1),
    "shares.seeds": integer(1, 100_000),
    "shares.steps": integer(3, 1_000_000),
    **{n: f for n, f in head.FIELDS.items() if n.startswith(("model.", "run_arms"))},
}
# All is dense, in float64, without an estimate of memory.
_SMALLER = {
    "task.length": integer(2, 2000),
    "task.d_x": integer(1, 1000),
    "model.d_k": integer(1, 1000),
    "model.d_v": integer(1, 1000),
}


class Bounds(NamedTuple):
    """Largest relative errors of a law."""

    float64: float  # against autodiff
    float32: float  # against autodiff in float64
    difference: float  # against central differences


class Slopes(NamedTuple):
    """The remainder of a small step against its rate."""

    problems: int  # random heads
    decades: float  # of rates
    rates: int
    tolerance: float  # of a slope of 2


class Shares(NamedTuple):
    """Real steps in short runs."""

    seeds: int
    steps: int


class Drawn(NamedTuple):
    """Parameters and sequences of a short run."""

    params: Params
    problem: Problem
    batches: Batch  # fresh sequences of all steps (steps, ...)


@dataclasses.dataclass(frozen=True)
class ProofSettings:
    """A proof of the laws, resolved."""

    name: str
    config: Mapping[str, Any]  # plain, as it is written to config.json
    seeds: int  # random problems
    root: int  # of every random key
    shapes: int  # of the problems
    longest: int  # most queries and sources
    widest: int
    bounds: Bounds
    slopes: Slopes
    shares: Shares
    task: str
    causal: bool
    draw: Callable[[jax.Array], Drawn]  # a seed's key -> its short run
    arms: Mapping[str, Algorithm]
    gradient: GradientFunction  # by the laws, of one sequence


def _fields(config: ConfigDict, catalogue: Catalogue) -> Fields:
    rules = {**FIELDS, **kinds.task_fields(config, head.head_tasks(catalogue))}
    return rules | {name: rule for name, rule in _SMALLER.items() if name in rules}


def _check(config: ConfigDict, catalogue: Catalogue) -> None:
    kinds.check_task(config, catalogue.tasks[config.task.name])
    for name, arm in config.arms.items():
        for field in catalogue.algorithms[arm.algorithm].optional(arm):
            if field in arm:
                raise ConfigError(f"arms.{name}.{field}={arm[field]!r}: no such field")


def _resolve(config: ConfigDict, catalogue: Catalogue) -> ProofSettings:
    fields, spec = config.task.to_dict(), catalogue.tasks[config.task.name]
    sequences = Sequences(spec, fields, batch_size=1, fresh=True)
    steps = config.shares.steps
    start = head.initial(config, spec)
    wiring = gradients.Wiring(spec.causal)
    gradient = functools.partial(gradients.by_laws, wiring=wiring)
    mix = functools.partial(gradients.mix_by_laws, causal=spec.causal)
    model = HeadModel(gradient, mix, steps)

    def draw(key: jax.Array) -> Drawn:
        own = jax.vmap(lambda step: sequences.of_step(key, step))(jnp.arange(steps))
        problem = head.draw(sequences, key)
        batches = jax.tree.map(lambda x: x[:, 0], own)
        return Drawn(start(stream(key, "init")), problem, batches)

    def algorithm(name: str) -> Algorithm:
        arm = config.arms[name]
        own = catalogue.algorithms[arm.algorithm]
        # Python's numbers, which take either precision.
        rates = {rate: arm[rate] for rate in own.rates(arm)}
        return own.head(kinds.static_fields(arm, KIND, own), rates, model)

    return ProofSettings(
        name=config.name,
        config=config.to_dict(),
        seeds=config.seeds,
        root=config.seed,
        shapes=config.shapes,
        longest=config.longest,
        widest=config.widest,
        bounds=Bounds(**config.bounds.to_dict()),
        slopes=Slopes(**config.slopes.to_dict()),
        shares=Shares(**config.shares.to_dict()),
        task=config.task.name,
        causal=spec.causal,
        draw=draw,
        arms={name: algorithm(name) for name in config.run_arms},
        gradient=gradient,
    )


KIND = kinds.Kind(command="check", fields=_fields, check=_check, resolve=_resolve)
