"""Arms x seeds x grid: each kind of arm is one compiled program, on every device.

Seeds are trained in rounds, so many at a time as there are devices, cores and room; the
next round begins when one is finished, so that memory does not grow with their number.
Random numbers derive from one root key, folded with the seed's id and the name of a
stream, so that a seed's numbers never depend on which other seeds or arms run.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxattn.algorithms import schedules
from jaxattn.engine import memory, processes
from jaxattn.experiments import config as config_lib
from jaxattn.experiments import one_head, wind_tunnel
from jaxattn.measures import trajectory
from jaxattn.tasks import catalogue
from jaxattn.tasks.base import Batch, Task

# Of the memory of a machine, that a run may use beside what trains.
_HOST_SHARE = 0.5
# What XLA may ask for, of the peak of a program: seen up to 1.3 with jax 0.12.0.
_XLA_SHARE = 1.35
# How often what is kept is there at once: in parts, joined, sorted and written.
_KEPT_COPIES = 4
_FEWER = {
    "eval_every": "a larger one, or fewer steps, seeds or arms",
    "snapshot_length": "a smaller one, or fewer snapshots, snapshot_seeds or arms",
    "task.length": "a smaller one, or fewer snapshots, snapshot_seeds or arms",
}

_STREAMS = ("init", "data", "eval", "dropout", "embedding", "walk")


class Problem(NamedTuple):
    """What one seed is given: where it starts, what it trains on, what judges it."""

    params: Any  # of one head; None of a transformer, where each arm has its own
    train: Batch  # (batch_size, ...)
    heldout: Batch  # one sequence, or (N, ...)
    log_bayes_train: jax.Array  # (batch_size, T, C), nats
    log_bayes_heldout: jax.Array  # (T, C), or (N, T, C), nats


class Points(NamedTuple):
    """The points of a config's grid: every regime x ratio x scale."""

    fresh: np.ndarray  # (P,) bool, whether every step draws new sequences
    ratio: np.ndarray  # (P,), how much faster the values move than the frame
    scale: np.ndarray  # (P,), times every learning rate


class Plan(NamedTuple):
    """Who trains how many seeds at once."""

    devices: tuple[jax.Device, ...]  # of this process, over which a batch is sharded
    together: int  # seeds of a batch on each
    workers: int  # batches at the same time, a thread each
    seed_bytes: int  # that one seed needs while it trains, by `memory.peak`
    device_bytes: int | None  # that a device has, if it says; those of a CPU share it

    @property
    def batch(self) -> int:
        """Seeds that a program is compiled for."""
        return len(self.devices) * self.together

    @property
    def slots(self) -> int:
        """Seeds at once in this process."""
        return self.batch * self.workers


class Kept(NamedTuple):
    """What is kept of some seeds; arrays of a grid have its points behind the arm."""

    seeds: np.ndarray  # (seed,) their ids, rising
    # metric -> (arm, seed, evaluation, ...), NaN if to come, or if an arm has no such.
    curves: dict[str, np.ndarray]
    # (arm, seed): the last step after which all weights were finite, if the next undid
    # it; or where a metric was not finite, if that was before; -1: neither.
    diverged_step: np.ndarray
    # What was seen beside curves, looking back, if anything.
    traits: dict[str, np.ndarray]  # (arm, seed, ...)
    # (arm, snapshot seed, snapshot, ...), of the snapshot seeds that are among these.
    snapshots: dict[str, np.ndarray]
    # What arms ended with, lead with seed, if it is to be kept; else ().
    weights: Any = ()


class Round(NamedTuple):
    """Seeds that train side by side, in the middle."""

    step: np.ndarray  # steps done, a scalar
    states: dict[str, schedules.State]  # by arm; leaves lead with slot, and point
    # Of every evaluation so far what is kept for looking back, by arm, lead with slot;
    # none of a grid, or if nothing is looked at.
    trail: tuple[dict[str, Any], ...]
    kept: Kept


class Carry(NamedTuple):
    """A run in the middle: all that is needed to go on from here."""

    started: np.ndarray  # how many seeds were begun, a scalar
    done: tuple[Kept, ...]
    rounds: tuple[Round, ...]  # more than one after a resume with fewer devices


class Result(NamedTuple):
    """A finished run."""

    step: np.ndarray  # (evaluation,)
    kept: Kept  # of all seeds
    allowed: np.ndarray | None  # (n, n) boolean, of snapshots; None without any


class Sweep(NamedTuple):
    """A sweep, compiled: one training program per structure of an arm."""

    config: ConfigDict
    plan: Plan
    states: dict[str, schedules.State]  # arm -> shapes of a seed's
    curves: dict[str, tuple[int, ...]]  # shapes of a seed's, behind the evaluation
    trail: dict[str, Any]  # arm -> shapes of a seed's, of one evaluation
    seen: trajectory.Seen | None  # shapes of a seed's; None if nothing is looked at
    snapshots: dict[str, tuple[int, ...]]  # likewise; empty if there are none
    begin: Callable  # ids -> problems, initial states by structure; lead with slot
    train: dict[schedules.Structure, Callable]  # -> states, last finite step
    evaluate: dict[Any, Callable]  # reading of an arm -> to metrics, what is kept
    look: dict[Any, Callable]  # the same -> to `trajectory.Seen`; empty of a grid
    picture: dict[Any, Callable]  # the same -> of one seed, to snapshots, if any
    compiled: tuple[jax.stages.Compiled, ...]  # the programs themselves, of a batch
    keeps_weights: bool  # of finished seeds


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a named stream, one of `_STREAMS`."""
    return jax.random.fold_in(key, _STREAMS.index(name))


def evaluation_steps(config: ConfigDict) -> np.ndarray:
    """Steps after which metrics are taken: 0, every `eval_every`, and the last."""
    return np.append(np.arange(0, config.steps, config.eval_every), config.steps)


def evaluation_count(config: ConfigDict) -> int:
    """How many there are, without listing them."""
    return -(-config.steps // config.eval_every) + 1


def points(config: ConfigDict) -> Points | None:
    """The grid's points in order, the scale fastest; None without a grid."""
    if "grid" not in config:
        return None
    axes = config.grid.fresh, config.grid.ratio, config.grid.scale
    fresh, ratio, scale = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    return Points(fresh, ratio.astype(np.float32), scale.astype(np.float32))


def plan(
    config: ConfigDict,
    devices: Sequence[jax.Device],
    *,
    together: int = 0,
    workers: int = 1,
    memory_share: float = 0.5,
) -> Plan:
    """How many seeds may run at once, from what one needs; nothing is compiled yet.

    On a CPU, one device, one seed in a batch and a worker for each core is best: twice
    as fast as splitting each operation over 2 cores (measured; its cache holds one
    seed), as fast as a device for each core, and the numbers depend on neither the
    workers nor the other seeds, to the last bit. For several devices or larger batches
    XLA compiles other fusions, and they agree to rounding.

    Args:
      config: checked, see `config.check`.
      devices: of this process; no more are used than there are seeds.
      together: seeds of a batch on each device; 0: one on a CPU, and elsewhere as many
        as there is room for.
      workers: batches at the same time; fewer if memory or seeds are too few.
      memory_share: of a device's memory, how much may be used; processes on one machine
        share that of its CPU.

    Returns:
      Plan, with as many slots in every process.

    Raises:
      ConfigError: there is not enough memory, of devices or beside them.
    """
    if not 0 <= memory_share <= 1:  # also of NaN
        raise config_lib.ConfigError(
            f"memory_share={memory_share!r}: allowed: a number from 0 to 1"
        )
    neighbours = processes.neighbours()
    room = int(_HOST_SHARE * memory.of_host()) // neighbours
    room = int(processes.gather(np.array([room])).min())  # or one alone would stop
    device_bytes = memory.of_device(devices[0])
    most = math.inf if device_bytes is None else int(memory_share * device_bytes)
    seed_bytes = _seed_bytes(config, room, most)
    on_cpu = devices[0].platform == "cpu"
    here = -(-config.seeds // jax.process_count())
    count = min(len(devices), here)
    share_it = count * neighbours if on_cpu else 1
    if device_bytes is None:
        fit = here if together else 1  # on each device, at once
    else:
        fit = most // share_it // seed_bytes
    if together == 0 and on_cpu:
        together = 1
    elif together == 0:  # in as few rounds as can be, all of about one size
        rounds = -(-here // (count * max(fit, 1)))
        together = -(-here // (count * rounds))
    workers = min(workers, fit // together, -(-here // (count * together)))
    numbers = processes.gather(np.array([[count, together, workers]])).min(axis=0)
    count, together, workers = numbers.tolist()
    if workers == 0:
        raise config_lib.ConfigError(
            f"memory_share={memory_share:g}: {together} seeds of"
            f" {seed_bytes / 2**30:.3g} GiB do not fit; allowed: a larger share, fewer"
            " seeds together, a smaller task or, with diagnostics, a larger eval_every"
        )
    return Plan(tuple(devices[:count]), together, workers, seed_bytes, device_bytes)


def build(
    config: ConfigDict,
    plan: Plan,
    *,
    keep_weights: bool = False,
    breakable: Callable = contextlib.nullcontext,
) -> Sweep:
    """Compiles the programs.

    Rates, step numbers, ids and states are arguments of the programs, so arms that
    differ in nothing else share one, and so do all seeds and points of a grid.

    Args:
      config: checked, see `config.check`.
      plan: from `plan`.
      keep_weights: also what each arm ends with is kept.
      breakable: a context around the wait for the compiler; what it raises leaves that
        at work.
    """
    problem, states = _shapes(config)
    programs = _programs(config, problem, states)
    lowered = {
        name: _lower_one(*program) if name[0] == "picture" else _lower(plan, *program)
        for name, program in programs.items()
    }
    pool = ThreadPoolExecutor()  # XLA compiles outside Python's lock
    try:
        with breakable():
            ready = pool.map(lambda program: program.compile(), lowered.values())
            compiled = dict(zip(lowered, ready, strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

    workers = ThreadPoolExecutor(plan.workers)

    def of_kind(kind: str) -> dict:
        return {which: p for (name, which), p in compiled.items() if name == kind}

    def over_slots(kind: str) -> dict:
        return {
            which: _spread(plan, workers, program)
            for which, program in of_kind(kind).items()
        }

    def shapes_of(kind: str) -> dict:
        return {
            which: jax.tree.map(lambda leaf: leaf.shape, p.out_info)
            for (name, which), p in lowered.items()
            if name == kind
        }

    (first,) = over_slots("begin").values()
    evaluated = shapes_of("evaluate")
    ahead = 1 + len(_over_points(config))  # slot, and point
    curves = _largest([metrics for metrics, _ in evaluated.values()], ahead)
    order = [name for name in one_head.METRICS if name in curves]
    looked = list(shapes_of("look").values())
    seen = trajectory.Seen(
        *(
            _largest([getattr(s, part) for s in looked], 1)
            for part in ("curves", "traits")
        )
    )
    pictured = list(shapes_of("picture").values())
    return Sweep(
        config,
        plan,
        {arm: states[_structure(config, arm)] for arm in config.run_arms},
        {name: curves[name] for name in [*order, *sorted(curves.keys() - order)]},
        {arm: _trail_shapes(config, states, arm) for arm in config.run_arms},
        seen if looked else None,
        pictured[0] if pictured else {},
        # A round is drawn once, though every stretch of it asks.
        functools.lru_cache(1)(lambda ids: first((), np.array(ids, np.uint32))),
        over_slots("train"),
        over_slots("evaluate"),
        over_slots("look"),
        of_kind("picture"),
        tuple(compiled.values()),
        keep_weights,
    )


def start() -> Carry:
    """The run before its first round."""
    return Carry(np.array(0), (), ())


def outline(sweep: Sweep, carry: dict) -> Carry:
    """Gives a carry that was taken apart into dicts its shape, but not its content.

    Args:
      sweep: compiled.
      carry: from `flax.serialization.to_state_dict`.
    """
    kept = _nothing_kept(sweep, np.arange(0))
    done = kept
    if sweep.keeps_weights:
        weights = {arm: state.params for arm, state in sweep.states.items()}
        done = kept._replace(weights=weights)
    rounds = tuple(
        Round(np.array(0), sweep.states, (sweep.trail,) * len(round_["trail"]), kept)
        for round_ in carry["rounds"].values()
    )
    return Carry(np.array(0), (done,) * len(carry["done"]), rounds)


def is_done(config: ConfigDict, carry: Carry) -> bool:
    """Whether every seed has had every step."""
    return carry.started == config.seeds and not carry.rounds


def steps_done(config: ConfigDict, carry: Carry) -> int:
    """Steps of all seeds, arms and points so far, of `cells` times the steps."""
    per_seed = [(kept, config.steps) for kept in carry.done]
    per_seed += [(round_.kept, int(round_.step)) for round_ in carry.rounds]
    seed_steps = sum(len(kept.seeds) * steps for kept, steps in per_seed)
    return seed_steps * cells(config) // config.seeds


def cells(config: ConfigDict) -> int:
    """How many runs a run is: arms times seeds, times the points of a grid."""
    return math.prod((len(config.run_arms), config.seeds, *_over_points(config)))


def advance(sweep: Sweep, carry: Carry) -> Carry:
    """Draws and evaluates a round, or trains it up to its next evaluation.

    Args:
      sweep: from `build`.
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
        return _begin_round(sweep, carry)
    round_, *others = carry.rounds
    round_ = _train_round(sweep, round_)
    if round_.step < sweep.config.steps:
        return carry._replace(rounds=(round_, *others))
    return carry._replace(done=(*carry.done, round_.kept), rounds=tuple(others))


def finish(sweep: Sweep, carry: Carry) -> Result:
    """What is kept of a finished run."""
    config = sweep.config
    allowed = None
    if sweep.snapshots:
        length = one_head.shown_length(config, config.snapshot_length)
        mask = one_head.head_mask(config, length)
        allowed = np.ones((length, length), bool) if mask is None else mask
    return Result(evaluation_steps(config), _join(config, carry.done), allowed)


def collect(sweep: Sweep, carry: Carry) -> Carry:
    """A carry that no longer depends on who trains what: with all processes' states."""
    config = sweep.config
    rounds = []
    for round_ in carry.rounds:
        seeds = slice(len(round_.kept.seeds))
        own = processes.gather((round_.states, round_.trail))
        states, trail = jax.tree.map(lambda leaf, s=seeds: leaf[s], own)
        rounds.append(round_._replace(states=states, trail=trail))
    done = (_join(config, carry.done),) if carry.done else ()
    return Carry(carry.started, done, tuple(rounds))


def deal(sweep: Sweep, carry: Carry) -> Carry:
    """The inverse of `collect`, also for other devices and processes than before."""
    size = sweep.plan.slots * jax.process_count()
    rounds = []
    for whole in carry.rounds:
        for first in range(0, len(whole.kept.seeds), size):
            seeds = np.arange(first, min(first + size, len(whole.kept.seeds)))
            slots = _slots(sweep.plan, seeds)
            own = whole.states, whole.trail
            own = jax.tree.map(lambda leaf, s=slots: leaf[s], own)
            kept = _pick(sweep.config, whole.kept, seeds)
            rounds.append(Round(whole.step, *own, kept))
    return carry._replace(rounds=tuple(rounds))


# --- a round of seeds


def _begin_round(sweep: Sweep, carry: Carry) -> Carry:
    config = sweep.config
    size = sweep.plan.slots * jax.process_count()
    seeds = np.arange(carry.started, min(carry.started + size, config.seeds))
    problems, states = sweep.begin(tuple(_slots(sweep.plan, seeds)))
    likely = np.isfinite(np.max(problems.log_bayes_heldout, axis=-1)).all()
    if any(processes.any_of(not likely)) and carry.started == 0:
        raise config_lib.ConfigError(
            f"task.name={config.task.name!r}: drew evidence that is impossible under"
            " its own model; allowed: task settings that give it a positive probability"
        )
    states = {
        arm: _at_every_point(config, states[_structure(config, arm)], axis=1)
        for arm in config.run_arms
    }
    round_ = Round(np.array(0), states, (), _nothing_kept(sweep, seeds))
    return Carry(
        np.array(seeds[-1] + 1),
        carry.done,
        (*carry.rounds, _record(sweep, round_, problems, index=0, diverged=None)),
    )


def _train_round(sweep: Sweep, round_: Round) -> Round:
    config = sweep.config
    steps = evaluation_steps(config)
    index = int(np.searchsorted(steps, round_.step, side="right"))
    begin, end = np.int32(round_.step), np.int32(steps[index])
    ids = _slots(sweep.plan, round_.kept.seeds)
    problems, _ = sweep.begin(tuple(ids))
    states, diverged = {}, {}
    for arm in config.run_arms:
        trained = sweep.train[_structure(config, arm)](
            (_rates(config, arm), _fresh(config), begin, end),
            *(ids, round_.states[arm], problems.train),
        )
        states[arm], diverged[arm] = trained
    round_ = round_._replace(step=np.array(int(end)), states=states)
    round_ = _record(sweep, round_, problems, index, diverged)
    return _look_back(sweep, round_, problems) if end == config.steps else round_


def _record(
    sweep: Sweep,
    round_: Round,
    problems: Problem,
    index: int,
    diverged: dict[str, np.ndarray] | None,
) -> Round:
    """Evaluates a round and keeps what is found.

    Args:
      sweep: compiled.
      round_: its states are the ones to evaluate.
      problems: of the round.
      index: of the evaluation.
      diverged: arm -> (slot, point) steps before weights were not finite, or -1.
    """
    config = sweep.config
    ids = _slots(sweep.plan, round_.kept.seeds)
    count = len(round_.kept.seeds)
    shared = np.int32(round_.step), _fresh(config)
    found, trail, at_start = [], {}, {}  # arms that are read alike start alike
    for arm in config.run_arms:
        reading = _reading(config, arm)
        results = at_start.get(reading) if index == 0 else None
        if results is None:
            params = round_.states[arm].params
            results = sweep.evaluate[reading](shared, ids, params, problems)
            at_start[reading] = results
        metrics, own = results
        found.append(metrics)
        trail[arm] = round_.states[arm].params if own is None else own
    values = _side_by_side(sweep, found, sweep.curves, count)
    curves = {name: curve.copy() for name, curve in round_.kept.curves.items()}
    place = _seed_axis(config) + 1
    for name, value in values.items():
        curves[name][(slice(None),) * place + (index,)] = value

    since = round_.kept.diverged_step
    if diverged is not None:
        new = processes.gather(np.stack(list(diverged.values()), axis=1))[:count]
        new = np.moveaxis(new, 0, -1)
        since = np.where(since < 0, new, since)
    judged = np.stack([values[name] for name in _subject(config).JUDGED])
    finite = np.isfinite(judged).all(axis=0)
    since = np.where((since < 0) & ~finite, np.int32(round_.step), since)

    looked_at = sweep.seen is not None or sweep.snapshots
    trail = (*round_.trail, trail) if looked_at else round_.trail
    kept = round_.kept._replace(curves=curves, diverged_step=since.astype(np.int32))
    return round_._replace(trail=trail, kept=kept)


def _look_back(sweep: Sweep, round_: Round, problems: Problem) -> Round:
    """Keeps what is to be seen of a finished round along its way."""
    config, kept = sweep.config, round_.kept
    if sweep.seen is not None:
        ids, count = _slots(sweep.plan, kept.seeds), len(kept.seeds)
        inputs = _subject(config).look_inputs(config, problems)
        found = [
            sweep.look[_reading(config, arm)](
                (), ids, _way(round_.trail, arm), round_.states[arm].params, *inputs
            )
            for arm in config.run_arms
        ]
        curves, traits = (
            _side_by_side(sweep, [getattr(f, part) for f in found], shapes, count)
            for part, shapes in sweep.seen._asdict().items()
        )
        kept = kept._replace(curves=kept.curves | curves, traits=traits)
    if sweep.snapshots:
        kept = kept._replace(snapshots=_pictures(sweep, round_, problems))
    if sweep.keeps_weights:
        own = {arm: round_.states[arm].params for arm in config.run_arms}
        everyone = processes.gather(own)
        weights = jax.tree.map(lambda leaf: leaf[: len(kept.seeds)], everyone)
        kept = kept._replace(weights=weights)
    return round_._replace(kept=kept)


def _side_by_side(
    sweep: Sweep, found: list[dict], shapes: dict[str, tuple], count: int
) -> dict[str, np.ndarray]:
    """What was found of each arm, lead with slot, as (arm, point, seed, ...).

    What an arm has less of than others, or not at all, is NaN.
    """
    axis = _seed_axis(sweep.config)
    size = sweep.plan.slots, *_over_points(sweep.config)

    def filled(metrics: dict, name: str) -> np.ndarray:
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


def _way(trail: Sequence[dict[str, Any]], arm: str) -> Any:
    """What is kept of an arm at some evaluations, (slot, evaluation, ...)."""
    ways = [evaluation[arm] for evaluation in trail]
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *ways)


def _pictures(sweep: Sweep, round_: Round, problems: Problem) -> dict[str, np.ndarray]:
    """Snapshots (arm, pictured seed, snapshot, ...) of a round, for every process.

    Each draws its own seeds, one by one: they are few.
    """
    config, slots = sweep.config, sweep.plan.slots
    shown, _ = one_head.shown(config, problems, config.snapshot_length)
    places = np.flatnonzero(_pictured(config, round_.kept.seeds))
    if len(places) == 0:
        return round_.kept.snapshots
    owner, slot = np.divmod(places, slots)
    shape = len(places), len(config.run_arms)
    drawn = {
        name: np.zeros((*shape, *rest), np.float32)
        for name, rest in sweep.snapshots.items()
    }
    trail = [round_.trail[index] for index in snapshot_indices(config)]
    for row, arm in enumerate(config.run_arms):
        way = _way(trail, arm)
        for number in np.flatnonzero(owner == jax.process_index()):
            own = jax.tree.map(lambda leaf, s=slot[number]: leaf[s], (way, shown))
            picture = sweep.picture[_reading(config, arm)]
            for name, array in picture(*own).items():
                drawn[name][number, row] = array
    everyone = processes.gather(drawn)
    place = owner * len(places) + np.arange(len(places))
    return {n: np.swapaxes(array[place], 0, 1) for n, array in everyone.items()}


def snapshot_indices(config: ConfigDict) -> list[int]:
    """Evaluations at which arrays of some seeds are kept; none of a grid.

    Evenly spread, from the first to the last.
    """
    if not config.get("snapshot_seeds"):
        return []
    last = evaluation_count(config) - 1
    return (
        np.unique(np.linspace(0, last, config.snapshots).round()).astype(int).tolist()
    )


def _nothing_kept(sweep: Sweep, seeds: np.ndarray) -> Kept:
    config = sweep.config
    of_seed = (len(config.run_arms), *_over_points(config), len(seeds))
    count = evaluation_count(config)
    curves, traits = {n: (count, *rest) for n, rest in sweep.curves.items()}, {}
    if sweep.seen is not None:
        curves |= sweep.seen.curves
        traits = sweep.seen.traits
    pictured = len(config.run_arms), int(_pictured(config, seeds).sum())

    def nothing(leading: tuple[int, ...], shapes: dict) -> dict[str, np.ndarray]:
        return {
            name: np.full((*leading, *shape), np.nan, np.float32)
            for name, shape in shapes.items()
        }

    return Kept(
        seeds,
        nothing(of_seed, curves),
        np.full(of_seed, -1, np.int32),
        nothing(of_seed, traits),
        nothing(pictured, sweep.snapshots),
    )


def _pictured(config: ConfigDict, seeds: np.ndarray) -> np.ndarray:
    """Which of the seeds snapshots are kept of; none of a grid."""
    return np.isin(seeds, config.get("snapshot_seeds", ()))


def _join(config: ConfigDict, parts: Sequence[Kept]) -> Kept:
    """Several as one, by rising ids."""
    seeds = np.concatenate([part.seeds for part in parts])

    def together(field: str, axis: int) -> dict[str, np.ndarray]:
        fields = [getattr(part, field) for part in parts]
        return {n: np.concatenate([f[n] for f in fields], axis) for n in fields[0]}

    joined = Kept(
        seeds,
        together("curves", _seed_axis(config)),
        np.concatenate([part.diverged_step for part in parts], axis=-1),
        together("traits", _seed_axis(config)),
        together("snapshots", 1),
        jax.tree.map(lambda *own: np.concatenate(own), *[p.weights for p in parts]),
    )
    return _pick(config, joined, np.argsort(seeds))


def _pick(config: ConfigDict, kept: Kept, which: np.ndarray) -> Kept:
    """Some of the seeds, by their places."""
    pictured = _pictured(config, kept.seeds)
    place = np.cumsum(pictured) - 1  # of a pictured seed among its likes
    places = place[which][pictured[which]]
    axis = _seed_axis(config)
    return Kept(
        kept.seeds[which],
        {name: np.take(curve, which, axis) for name, curve in kept.curves.items()},
        kept.diverged_step[..., which],
        {name: np.take(trait, which, axis) for name, trait in kept.traits.items()},
        {name: array[:, places] for name, array in kept.snapshots.items()},
        jax.tree.map(lambda leaf: leaf[which], kept.weights),
    )


def _slots(plan: Plan, seeds: np.ndarray) -> np.ndarray:
    """Who sits in this process's slots; where no seed is left, the last one again."""
    mine = jax.process_index() * plan.slots + np.arange(plan.slots)
    return seeds[np.minimum(mine, len(seeds) - 1)].astype(np.uint32)


# --- one seed


def draw_problem(config: ConfigDict, seed_id: jax.Array) -> Problem:
    """The problem of a seed; it depends on nothing else that runs."""
    task, subject = _task(config, seed_id), _subject(config)
    params = None
    if subject is one_head:
        params = _init(config, _structure(config, config.run_arms[0]), seed_id)
    train = draw_batch(config, seed_id, 0)
    eval_key = stream(_seed_key(config, seed_id), "eval")
    heldout, log_bayes_heldout = subject.heldout(config, task, eval_key)
    return Problem(
        params, train, heldout, jax.vmap(task.bayes)(train), log_bayes_heldout
    )


def _init(config: ConfigDict, structure: schedules.Structure, seed_id: jax.Array):
    key = stream(_seed_key(config, seed_id), "init")
    return _subject(config).init(config, structure, key)


def _begin(
    config: ConfigDict, shared: tuple, seed_id: jax.Array
) -> tuple[Problem, dict[schedules.Structure, schedules.State]]:
    del shared
    problem, subject = draw_problem(config, seed_id), _subject(config)
    states = {}
    for structure, arm in _arms(config).items():
        params = problem.params
        if params is None:
            params = _init(config, structure, seed_id)
        # Whatever its rates, a schedule starts the same.
        rates = config_lib.rates(config.arms[arm])
        states[structure] = subject.schedule(config, structure, rates).init(params)
    return problem, states


def _train_points(
    config: ConfigDict,
    structure: schedules.Structure,
    shared: tuple,
    seed_id: jax.Array,
    state: schedules.State,
    batch: Batch,
) -> tuple[schedules.State, jax.Array]:
    rates, fresh, begin, end = shared

    def at_point(fresh, rates, state):
        schedule = _subject(config).schedule(config, structure, rates)
        return _train(config, schedule, fresh, begin, end, seed_id, state, batch)

    return _map_points(config, at_point, fresh, rates, state)


def _evaluate_points(
    config: ConfigDict,
    reading: Any,
    shared: tuple,
    seed_id: jax.Array,
    params: Any,
    problem: Problem,
) -> tuple[dict[str, jax.Array], Any]:
    step, fresh = shared

    def at_point(fresh, params):
        return _evaluate(config, reading, step, fresh, seed_id, params, problem)

    return _map_points(config, at_point, fresh, params)


def _map_points(config: ConfigDict, function: Callable, fresh, *own):
    """function(fresh, *own) at each point of the grid, or where there is none."""
    if fresh is None:
        return function(config.fresh, *own)
    return jax.lax.map(lambda point: function(*point), (fresh, *own))


def _look(
    config: ConfigDict, reading: Any, shared: tuple, seed_id: jax.Array, *own
) -> trajectory.Seen:
    del shared
    key = stream(_seed_key(config, seed_id), "walk")
    return _subject(config).look(config, reading, key, *own)


def _picture(
    config: ConfigDict, reading: Any, shared: tuple, trail: Any, shown: Batch
) -> dict[str, jax.Array]:
    del shared
    return one_head.picture(config, reading, trail, shown)


def _train(
    config: ConfigDict,
    schedule: schedules.Schedule,
    fresh: jax.Array | bool,
    begin: jax.Array,
    end: jax.Array,
    seed_id: jax.Array,
    state: schedules.State,
    train: Batch,
) -> tuple[schedules.State, jax.Array]:
    """The state at the end, and the last step before its weights were not finite."""
    key = stream(_seed_key(config, seed_id), "dropout")

    def step(index: jax.Array, so_far: tuple) -> tuple:
        state, since = so_far
        batch = _only_if(fresh, lambda: draw_batch(config, seed_id, index), train)
        state, _ = schedule.step(state, batch, jax.random.fold_in(key, index))
        finite = jax.tree.map(lambda w: jnp.isfinite(w).all(), state.params)
        lost = ~jnp.stack(jax.tree.leaves(finite)).all()
        return state, jnp.where((since < 0) & lost, index, since)

    return jax.lax.fori_loop(begin, end, step, (state, jnp.int32(-1)))


def _evaluate(
    config: ConfigDict,
    reading: Any,
    step: jax.Array,
    fresh: jax.Array | bool,
    seed_id: jax.Array,
    params: Any,
    problem: Problem,
) -> tuple[dict[str, jax.Array], Any]:
    """Metrics, and what is kept beside them for looking back; None: the weights."""

    def last_trained_on() -> tuple[Batch, jax.Array]:
        batch = draw_batch(config, seed_id, jnp.maximum(step - 1, 0))
        return batch, jax.vmap(_task(config, seed_id).bayes)(batch)

    train = _only_if(fresh, last_trained_on, (problem.train, problem.log_bayes_train))
    heldout = problem.heldout, problem.log_bayes_heldout
    key = stream(_seed_key(config, seed_id), "walk")
    return _subject(config).evaluate(config, reading, key, params, train, heldout)


def _only_if(condition: jax.Array | bool, drawn: Callable, otherwise):
    """A choice that a program makes, or that is made before there is one."""
    if isinstance(condition, bool):
        return drawn() if condition else otherwise
    return jax.lax.cond(condition, drawn, lambda: otherwise)


def draw_batch(config: ConfigDict, seed_id: jax.Array, step) -> Batch:
    """The sequences of a step (batch_size, ...), if they are fresh ones."""
    key = stream(_seed_key(config, seed_id), "data")
    key = jax.random.fold_in(key, step)
    sample = _task(config, seed_id).sample
    return jax.vmap(lambda n: sample(jax.random.fold_in(key, n)))(
        jnp.arange(config.batch_size)
    )


# --- what a config says


def _seed_key(config: ConfigDict, seed_id: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(config.seed), seed_id)


def _task(config: ConfigDict, seed_id: jax.Array) -> Task:
    key = _seed_key(config, seed_id)
    if config.task.get("embedding_seed", -1) >= 0:
        # One for all seeds, with an id of none of them.
        root = jax.random.key(config.task.embedding_seed)
        key = jax.random.fold_in(root, np.uint32(2**32 - 1))
    return catalogue.TASKS[config.task.name].build(
        config.task, stream(key, "embedding")
    )


def axes_behind(config: ConfigDict) -> dict[str, tuple[str, ...]]:
    """Metric -> the axes behind those of arms, seeds and evaluations, if any."""
    return _subject(config).AXES


def _subject(config: ConfigDict):
    """The module of what is trained."""
    return wind_tunnel if config_lib.is_tunnel(config) else one_head


def _reading(config: ConfigDict, arm: str) -> Any:
    return _subject(config).reading(config, _structure(config, arm))


def _structure(config: ConfigDict, arm: str) -> schedules.Structure:
    return config_lib.structure(config.arms[arm])


def _arms(config: ConfigDict) -> dict[schedules.Structure, str]:
    """The structures that run, each with the first arm that has it."""
    return {_structure(config, arm): arm for arm in reversed(config.run_arms)}


def _rates(config: ConfigDict, arm: str) -> dict[str, np.ndarray]:
    """The rates of an arm, scalars or (P,)."""
    rates = config_lib.rates(config.arms[arm])
    rates = {name: np.float32(rate) for name, rate in rates.items()}
    grid = points(config)
    return rates if grid is None else schedules.spread(rates, grid.scale, grid.ratio)


def _fresh(config: ConfigDict) -> np.ndarray | None:
    """What a program is told of fresh sequences: (P,); without a grid it knows."""
    grid = points(config)
    return None if grid is None else grid.fresh


def _seed_axis(config: ConfigDict) -> int:
    """Of what is kept: behind those of arms, and of points."""
    return 1 + len(_over_points(config))


def _over_points(config: ConfigDict) -> tuple[int, ...]:
    grid = points(config)
    return () if grid is None else grid.scale.shape


def _at_every_point(config: ConfigDict, tree, axis: int = 0):
    """Leaves of arrays or shapes, with the points of a grid, if any, at an axis."""
    for count in _over_points(config):

        def repeated(leaf, n=count):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                shape = (*leaf.shape[:axis], n, *leaf.shape[axis:])
                return jax.ShapeDtypeStruct(shape, leaf.dtype)
            return np.repeat(np.expand_dims(leaf, axis), n, axis=axis)

        tree = jax.tree.map(repeated, tree)
    return tree


# --- where seeds run


def _seed_bytes(config: ConfigDict, room: int, most: float) -> int:
    """What a seed needs at most: problem and states, and what a program works on.

    Args:
      config: checked.
      room: bytes of the machine for what is kept of all seeds.
      most: bytes that it may need; what is more than that may be more still.

    Raises:
      ConfigError: that does not fit; before anything is made that would not.
    """
    _require_mask(config, room)
    problem, states = _shapes(config)
    of_arms = [states[_structure(config, arm)] for arm in config.run_arms]
    held = memory.size([problem, *of_arms])
    if held > most:  # tracing would take its time
        return held
    if _subject(config).looks(config) or snapshot_indices(config):
        trails = [_trail_shapes(config, states, arm) for arm in config.run_arms]
        held += memory.size(trails) * evaluation_count(config)
    programs = _programs(config, problem, states)
    traced: dict[tuple, Any] = {}

    def trace(kind: str) -> int:
        """Bytes of what programs of a kind find of a seed and all arms."""
        for name, (function, shared, *own) in programs.items():
            if name[0] == kind:
                traced[name] = jax.make_jaxpr(function)(shared, *own)
        found = [traced.get((kind, _reading(config, arm))) for arm in config.run_arms]
        return sum(memory.size(program.out_avals) for program in found if program)

    evaluations = trace("evaluate") * evaluation_count(config) * config.seeds
    _require_kept(config, "eval_every", evaluations, room)
    if held > most:
        return held
    if _subject(config).looks(config):
        length = catalogue.TASKS[config.task.name].positions(config.task)
        if evaluation_count(config) * length >= 2**31:  # more than XLA can count
            raise config_lib.ConfigError(
                f"eval_every={config.eval_every!r}: {evaluation_count(config)}"
                f" evaluations of {length} positions are too many to look back at;"
                " allowed: a larger eval_every, or no diagnostics"
            )
    pictures = trace("picture") * len(config.get("snapshot_seeds", ()))
    everywhere = not catalogue.TASKS[config.task.name].causal
    length_field = "task.length" if everywhere else "snapshot_length"
    _require_kept(config, length_field, pictures, room)
    for kind in ("begin", "train", "look"):
        trace(kind)
    return held + int(_XLA_SHARE * max(map(memory.peak, traced.values())))


def _require_mask(config: ConfigDict, room: int) -> None:
    """Raises ConfigError where a causal mask does not fit; nothing is traced yet.

    Whoever traces a program has the mask itself: it, another and where they differ.
    """
    task = catalogue.TASKS[config.task.name]
    length = task.positions(config.task)
    if task.causal and 3 * length**2 > room:
        name = "length" if "length" in config.task else "name"
        raise config_lib.ConfigError(
            f"task.{name}={config.task[name]!r}: a causal mask of {length} positions"
            f" does not fit; allowed here: at most {math.isqrt(room // 3)} positions"
        )


def _require_kept(config: ConfigDict, field: str, size: int, room: int) -> None:
    """Raises ConfigError where so much of what is found does not fit."""
    needed, gib = _KEPT_COPIES * size, 2**30
    if needed > room:
        value = config_lib.flatten(config)[field]
        raise config_lib.ConfigError(
            f"{field}={value!r}: what is kept of all seeds needs"
            f" {needed / gib:.3g} GiB, and there are {room / gib:.3g} for it; allowed:"
            f" {_FEWER[field]}"
        )


def _programs(config: ConfigDict, problem: Problem, states: dict) -> dict[tuple, tuple]:
    """What a sweep compiles, each as (function, shared, *of one seed), see `_lower`.

    By kind and what it is for: ("begin", None), ("train", structure), ("evaluate",
    reading of an arm), for diagnostics ("look", the same), and for snapshots
    ("picture", the same), which is of one seed alone. The shapes are from `_shapes`.
    """
    ids, step = jax.ShapeDtypeStruct((), np.uint32), np.int32(0)
    programs = {("begin", None): (functools.partial(_begin, config), (), ids)}
    for structure, arm in _arms(config).items():
        train = functools.partial(_train_points, config, structure)
        shared = _rates(config, arm), _fresh(config), step, step
        own = ids, states[structure], problem.train
        programs["train", structure] = train, shared, *own
    for arm in reversed(config.run_arms):
        reading, params = _reading(config, arm), states[_structure(config, arm)].params
        evaluate = functools.partial(_evaluate_points, config, reading)
        shared = step, _fresh(config)
        programs["evaluate", reading] = evaluate, shared, ids, params, problem
        if _subject(config).looks(config):
            trail = _trail_shapes(config, states, arm)
            own = ids, _stacked(trail, evaluation_count(config)), params
            own += _of_one(lambda p: _subject(config).look_inputs(config, p), problem)
            look = functools.partial(_look, config, reading)
            programs["look", reading] = look, (), *own
        if snapshot_indices(config):
            trail = _stacked(params, len(snapshot_indices(config)))
            shown, _ = _of_one(
                lambda p: one_head.shown(config, p, config.snapshot_length), problem
            )
            picture = functools.partial(_picture, config, reading)
            programs["picture", reading] = picture, (), trail, shown
    return programs


def _trail_shapes(config: ConfigDict, states: dict, arm: str) -> Any:
    """Shapes of what is kept of one evaluation of an arm, for looking back."""
    params = states[_structure(config, arm)].params
    return _subject(config).trail_shapes(config, _reading(config, arm), params)


def _largest(found: list[dict[str, tuple]], ahead: int) -> dict[str, tuple[int, ...]]:
    """The shape that holds any of several, behind so many axes, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in (item for metrics in found for item in metrics.items()):
        own = shape[ahead:]
        shapes[name] = tuple(map(max, own, shapes.get(name, own)))
    return shapes


def _of_one(function: Callable, problem: Problem):
    """Shapes of one seed's function(problems that lead with a slot)."""
    several = jax.eval_shape(function, _stacked(problem, 1))
    return jax.tree.map(lambda leaf: leaf.update(shape=leaf.shape[1:]), several)


def _stacked(tree, count: int):
    """Shapes of so many of a kind."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), tree
    )


def _shapes(config: ConfigDict) -> tuple[Problem, dict]:
    """Shapes of a seed's problem, and of its states by structure, at every point."""
    begin = functools.partial(_begin, config, ())
    problem, states = jax.eval_shape(begin, jax.ShapeDtypeStruct((), np.uint32))
    return problem, {s: _at_every_point(config, state) for s, state in states.items()}


def _lower(plan: Plan, function: Callable, shared, *own) -> jax.stages.Lowered:
    """Lowers function(shared, *of one seed) for a batch, sharded over the devices.

    With one seed on a device nothing is batched: XLA fuses batches of other sizes in
    other ways, which would be other bits.

    Args:
      plan: which devices, and how many seeds of a batch on each.
      function: of what all seeds share, and what is one's own.
      shared: an example of what is shared.
      own: examples of what is one seed's.

    Returns:
      Lowered (shared, *own leading with the seed of a batch) -> results alike.
    """

    def on_device(shared, *own):
        if plan.together > 1:
            return jax.vmap(functools.partial(function, shared))(*own)
        result = function(shared, *jax.tree.map(lambda leaf: leaf[0], own))
        return jax.tree.map(lambda leaf: leaf[None], result)

    dealt, all_of_it = PartitionSpec("seed"), PartitionSpec()
    mesh = Mesh(np.array(plan.devices), ("seed",))
    specs = (all_of_it, *(dealt for _ in own))
    program = jax.jit(
        jax.shard_map(
            on_device, mesh=mesh, in_specs=specs, out_specs=dealt, check_vma=False
        ),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
        out_shardings=NamedSharding(mesh, dealt),
    )
    return program.lower(shared, *_stacked(own, plan.batch))


def _lower_one(function: Callable, shared, *own) -> jax.stages.Lowered:
    """Lowers function(shared, *of one seed) for one seed."""
    return jax.jit(functools.partial(function, shared)).lower(*own)


def _spread(plan: Plan, workers: ThreadPoolExecutor, compiled: Callable) -> Callable:
    """Makes (shared, ids, *own) over all slots from a program over a batch of them."""

    def one_batch(first: int, shared, own):
        of_batch = slice(first, first + plan.batch)
        results = compiled(shared, *jax.tree.map(lambda leaf: leaf[of_batch], own))
        return jax.tree.map(np.asarray, results)

    def over_slots(shared, ids, *own):
        firsts = range(0, plan.slots, plan.batch)
        batches = {tuple(ids[f : f + plan.batch].tolist()): f for f in reversed(firsts)}
        # Slots alike are done once.
        done = workers.map(
            lambda f: one_batch(f, shared, (ids, *own)), batches.values()
        )
        done = dict(zip(batches, done, strict=True))
        parts = [done[tuple(ids[f : f + plan.batch].tolist())] for f in firsts]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    return over_slots
