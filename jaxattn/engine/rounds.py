"""Seeds in rounds, so many at a time as fit: draw, train, evaluate, record.

The next round begins when one is finished, so that memory does not grow with the number
of seeds. States stay on the devices; only metrics are fetched.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxattn.engine import processes, records, seed
from jaxattn.engine.programs import (
    Batches,
    Plan,
    Programs,
    at_every_point,
    fetch,
    split,
)
from jaxattn.engine.records import Records
from jaxattn.experiments import Experiment
from jaxattn.fields import ConfigError


class Round(NamedTuple):
    """Seeds that train side by side, in the middle.

    While it trains states are batches on the devices, and trails batches on the host;
    in a checkpoint each is one tree of arrays that lead with the seeds.
    """

    step: np.ndarray  # steps done, a scalar
    states: dict[str, Any]  # by arm; leaves lead with slot, and point
    trail: tuple[dict[str, Any], ...]  # of every evaluation so far, by arm
    records: Records
    problems: Batches | None = None  # drawn anew after a resume


class Carry(NamedTuple):
    """A run in the middle: all that is needed to go on from here."""

    started: np.ndarray  # how many seeds were begun, a scalar
    done: tuple[Records, ...]
    rounds: tuple[Round, ...]  # more than one after a resume with fewer devices


def start() -> Carry:
    """The run before its first round."""
    return Carry(np.array(0), (), ())


def is_done(experiment: Experiment, carry: Carry) -> bool:
    """Whether every seed has had every step."""
    return carry.started == experiment.seeds and not carry.rounds


def cells(experiment: Experiment) -> int:
    """How many runs a run is: arms times seeds, times the points of a grid."""
    points = math.prod(experiment.over_points)
    return len(experiment.arms) * experiment.seeds * points


def steps_done(experiment: Experiment, carry: Carry) -> int:
    """Steps of all seeds, arms and points so far, of `cells` times the steps."""
    per_seed = [(part, experiment.steps) for part in carry.done]
    per_seed += [(round_.records, int(round_.step)) for round_ in carry.rounds]
    seed_steps = sum(len(part.seeds) * steps for part, steps in per_seed)
    return seed_steps * cells(experiment) // experiment.seeds


def advance(programs: Programs, carry: Carry) -> Carry:
    """Draws and evaluates a round, or trains it up to its next evaluation.

    Args:
      programs: compiled.
      carry: from `start`, `advance` or `deal`; not changed. Of several processes, each
        gives its own.

    Returns:
      The next Carry.

    Raises:
      ConfigError: the task drew evidence that its own model calls impossible for a seed
        of the first round. Of a later one, the metrics are NaN: it counts as diverged.
      ProcessLostError: another process is gone.
    """
    if not carry.rounds:
        return _begin_round(programs, carry)
    round_, *others = carry.rounds
    round_ = _train_round(programs, round_)
    if round_.step < programs.experiment.steps:
        return carry._replace(rounds=(round_, *others))
    return carry._replace(done=(*carry.done, round_.records), rounds=tuple(others))


def finished(experiment: Experiment, carry: Carry) -> Records:
    """What was recorded of all seeds of a finished run."""
    return records.join(experiment, carry.done)


# --- a run in the middle, for a checkpoint


def collect(programs: Programs, carry: Carry) -> Carry:
    """Fetches the states of all processes, so that it matters no more who has which."""
    rounds = []
    for round_ in carry.rounds:
        count = len(round_.records.seeds)
        own = {arm: fetch(batches) for arm, batches in round_.states.items()}
        trail = tuple(
            {arm: fetch(batches) for arm, batches in evaluation.items()}
            for evaluation in round_.trail
        )
        everyone = processes.gather((own, trail))
        states, trail = jax.tree.map(lambda leaf, n=count: leaf[:n], everyone)
        rounds.append(Round(round_.step, states, trail, round_.records))
    done = (finished(programs.experiment, carry),) if carry.done else ()
    return Carry(carry.started, done, tuple(rounds))


def deal(programs: Programs, carry: Carry) -> Carry:
    """The inverse of `collect`, also for other devices and processes than before."""
    plan = programs.plan
    size = plan.slots * jax.process_count()
    rounds = []
    for whole in carry.rounds:
        for first in range(0, len(whole.records.seeds), size):
            seeds = np.arange(first, min(first + size, len(whole.records.seeds)))
            slots = _slots(plan, seeds)

            def own(tree: Any, slots=slots) -> Batches:
                return split(plan, jax.tree.map(lambda leaf: leaf[slots], tree))

            rounds.append(
                Round(
                    whole.step,
                    {arm: own(state) for arm, state in whole.states.items()},
                    tuple({a: own(t) for a, t in e.items()} for e in whole.trail),
                    records.pick(programs.experiment, whole.records, seeds),
                )
            )
    return carry._replace(rounds=tuple(rounds))


def outline(programs: Programs, carry: Mapping) -> Carry:
    """Gives a carry that was taken apart into dicts its shape, but not its content.

    Args:
      programs: compiled.
      carry: from `flax.serialization.to_state_dict`.
    """
    experiment, sketch = programs.experiment, programs.sketch
    nothing = records.empty(experiment, sketch.layout, np.arange(0))
    done = nothing
    if programs.keeps_weights:
        weights = {arm: state.params for arm, state in sketch.states.items()}
        done = nothing._replace(weights=weights)
    rounds = tuple(
        Round(
            np.array(0),
            sketch.states,
            (sketch.trail,) * len(round_["trail"]),
            nothing,
        )
        for round_ in carry["rounds"].values()
    )
    return Carry(np.array(0), (done,) * len(carry["done"]), rounds)


# --- a round of seeds


def _begin_round(programs: Programs, carry: Carry) -> Carry:
    experiment = programs.experiment
    size = programs.plan.slots * jax.process_count()
    seeds = np.arange(carry.started, min(carry.started + size, experiment.seeds))
    begun = programs.begin(_ids(programs.plan, seeds))
    problems = [problem for problem, _ in begun]
    if carry.started == 0:
        _require_possible(experiment, problems)
    states = {
        arm.name: [
            at_every_point(experiment, of_batch[arm.program], axis=1)
            for _, of_batch in begun
        ]
        for arm in experiment.arms
    }
    nothing = records.empty(experiment, programs.sketch.layout, seeds)
    round_ = Round(np.array(0), states, (), nothing, problems)
    return Carry(
        np.array(seeds[-1] + 1),
        carry.done,
        (*carry.rounds, _evaluate(programs, round_, index=0, diverged=None)),
    )


def _require_possible(experiment: Experiment, problems: Batches) -> None:
    """Raises ConfigError where Bayes says NaN of evidence: of probability zero."""
    log_bayes = fetch([problem.log_bayes_heldout for problem in problems])
    likely = np.isfinite(np.max(log_bayes, axis=-1)).all()
    if any(processes.any_of(not likely)):
        raise ConfigError(experiment.impossible)


def _train_round(programs: Programs, round_: Round) -> Round:
    experiment = programs.experiment
    steps = experiment.evaluation_steps()
    index = int(np.searchsorted(steps, round_.step, side="right"))
    first, end = np.int32(round_.step), np.int32(steps[index])
    ids = _ids(programs.plan, round_.records.seeds)
    problems = round_.problems
    if problems is None:
        problems = [problem for problem, _ in programs.begin(ids)]
    options = seed.options(experiment)
    states: dict[str, Batches] = {}
    diverged: dict[str, np.ndarray] = {}
    for arm in experiment.arms:
        shared = arm.rates, options, first, end
        trained = programs.train[arm.program](
            shared, ids, round_.states[arm.name], problems
        )
        states[arm.name] = [state for state, _ in trained]
        diverged[arm.name] = fetch([since for _, since in trained])
    round_ = round_._replace(step=np.array(int(end)), states=states, problems=problems)
    round_ = _evaluate(programs, round_, index, diverged)
    return _look_back(programs, round_) if end == experiment.steps else round_


def _evaluate(
    programs: Programs,
    round_: Round,
    index: int,
    diverged: dict[str, np.ndarray] | None,
) -> Round:
    """Evaluates a round and records what is found.

    Args:
      programs: compiled.
      round_: its states are the ones to evaluate.
      index: of the evaluation.
      diverged: arm -> (slot, point) steps before weights were not finite, or -1.
    """
    experiment, own = programs.experiment, round_.records
    ids, count = _ids(programs.plan, own.seeds), len(own.seeds)
    shared = np.int32(round_.step), seed.options(experiment)
    found, trail, at_start = [], {}, {}  # arms that are read alike start alike
    for arm in experiment.arms:
        params = [state.params for state in round_.states[arm.name]]
        scores = at_start.get(arm.reading) if index == 0 else None
        if scores is None:
            evaluate = programs.evaluate[arm.reading]
            scores = evaluate(shared, ids, params, round_.problems)
            at_start[arm.reading] = scores
        found.append(fetch([of_batch.metrics for of_batch in scores]))
        if arm.name in programs.sketch.trail:
            trails = [of_batch.trail for of_batch in scores]
            # Recorded, so that it takes room of the host, not of a device.
            trail[arm.name] = jax.device_get(params if trails[0] is None else trails)
    layout = programs.sketch.layout
    values = _side_by_side(programs, found, _of_evaluation(layout.curves, found), count)
    curves = {name: curve.copy() for name, curve in own.curves.items()}
    place = records.seed_axis(experiment) + 1
    for name, value in values.items():
        curves[name][(slice(None),) * place + (index,)] = value

    since = own.diverged_step
    if diverged is not None:
        new = processes.gather(np.stack(list(diverged.values()), axis=1))[:count]
        since = np.where(since < 0, np.moveaxis(new, 0, -1), since)
    judged = np.stack([values[name] for name in experiment.judged])
    finite = np.isfinite(judged).all(axis=0)
    since = np.where((since < 0) & ~finite, np.int32(round_.step), since)

    own = own._replace(curves=curves, diverged_step=since.astype(np.int32))
    return round_._replace(trail=(*round_.trail, trail), records=own)


def _of_evaluation(
    curves: records.Shapes, found: list[dict[str, np.ndarray]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of what one evaluation gives, which is not all that has a curve."""
    names = {name for metrics in found for name in metrics}
    return {name: shape[1:] for name, shape in curves.items() if name in names}


def _look_back(programs: Programs, round_: Round) -> Round:
    """Records what is found of a finished round by looking back at all of it."""
    experiment, own = programs.experiment, round_.records
    if programs.retrace:
        ids, count = _ids(programs.plan, own.seeds), len(own.seeds)
        found = []
        for arm in experiment.arms:
            final = [state.params for state in round_.states[arm.name]]
            trail = [_along(path) for path in _trails(round_.trail, arm.name)]
            retrace = programs.retrace[arm.reading]
            found.append(retrace((), ids, trail, final, round_.problems))
        curves, traits = (
            [fetch([getattr(batch, part) for batch in of_arm]) for of_arm in found]
            for part in ("curves", "traits")
        )
        layout = programs.sketch.layout
        shapes = {n: s for n, s in layout.curves.items() if any(n in c for c in curves)}
        own = own._replace(
            curves=own.curves | _side_by_side(programs, curves, shapes, count),
            traits=_side_by_side(programs, traits, layout.traits, count),
        )
    if programs.snapshots:
        own = own._replace(snapshots=_snapshots(programs, round_))
    if programs.keeps_weights:
        params = {
            arm: fetch([state.params for state in states])
            for arm, states in round_.states.items()
        }
        everyone = processes.gather(params)
        weights = jax.tree.map(lambda leaf: leaf[: len(own.seeds)], everyone)
        own = own._replace(weights=weights)
    return round_._replace(records=own)


def _side_by_side(
    programs: Programs,
    found: list[dict[str, np.ndarray]],
    shapes: records.Shapes,
    count: int,
) -> dict[str, np.ndarray]:
    """What was found of each arm, lead with slot, as (arm, point, seed, ...).

    What an arm has less of than others, or not at all, is NaN.
    """
    axis = records.seed_axis(programs.experiment)
    size = programs.plan.slots, *programs.experiment.over_points

    def filled(metrics: dict[str, np.ndarray], name: str) -> np.ndarray:
        whole = np.full((*size, *shapes[name]), np.nan, np.float32)
        if name in metrics:
            value = metrics[name]
            whole[tuple(map(slice, value.shape))] = value
        return whole

    together = {
        name: np.stack([filled(metrics, name) for metrics in found], axis=1)
        for name in shapes
    }
    everyone = processes.gather(together)
    return {n: np.moveaxis(a[:count], 0, axis) for n, a in everyone.items()}


def _trails(trail: tuple[dict[str, Batches], ...], arm: str) -> list[list]:
    """What is recorded of an arm at some evaluations, for each batch."""
    return list(zip(*(evaluation[arm] for evaluation in trail), strict=True))


def _along(evaluations: list) -> Any:
    """Stacks evaluations of a batch, (seed, evaluation, ...)."""
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *evaluations)


def _snapshots(programs: Programs, round_: Round) -> dict[str, np.ndarray]:
    """Snapshots (arm, snapshot seed, snapshot, ...) of a round, for every process.

    Each takes those of its own seeds, one by one: they are few.
    """
    experiment, plan = programs.experiment, programs.plan
    chosen = records.is_snapshot_seed(experiment, round_.records.seeds)
    places = np.flatnonzero(chosen)
    if len(places) == 0:
        return round_.records.snapshots
    owner, slot = np.divmod(places, plan.slots)
    shape = len(places), len(experiment.arms)
    taken = {
        name: np.zeros((*shape, *rest), np.float32)
        for name, rest in programs.sketch.layout.snapshots.items()
    }
    trail = tuple(round_.trail[index] for index in experiment.snapshot_indices())
    for row, arm in enumerate(experiment.arms):
        trails = _trails(trail, arm.name)
        for number in np.flatnonzero(owner == jax.process_index()):
            batch, place = divmod(int(slot[number]), plan.batch)
            own = _along(trails[batch]), jax.device_get(round_.problems[batch])
            path, problem = jax.tree.map(lambda leaf, p=place: leaf[p], own)
            for name, array in programs.snapshots[arm.reading](path, problem).items():
                taken[name][number, row] = array
    everyone = processes.gather(taken)
    place = owner * len(places) + np.arange(len(places))
    return {n: np.swapaxes(array[place], 0, 1) for n, array in everyone.items()}


def _slots(plan: Plan, seeds: np.ndarray) -> np.ndarray:
    """Who sits in this process's slots; where no seed is left, the last one again."""
    mine = jax.process_index() * plan.slots + np.arange(plan.slots)
    return seeds[np.minimum(mine, len(seeds) - 1)].astype(np.uint32)


def _ids(plan: Plan, seeds: np.ndarray) -> Batches:
    return split(plan, _slots(plan, seeds))
