"""Arms x seeds x grid: each kind of arm is one compiled program, on every device.

Seeds are trained in rounds, so many at a time as there are devices, cores and room; the
next round begins when one is finished, so that memory does not grow with their number.
Random numbers derive from one root key, folded with the seed's id and the name of a
stream, so that a seed's numbers never depend on which other seeds or arms run.
"""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxattn import attention, losses, memory, processes, schedules, trajectory
from jaxattn import config as config_lib
from jaxattn.attention import Params
from jaxattn.tasks import catalogue
from jaxattn.tasks.base import Batch, Task

_STREAMS = ("init", "data", "eval", "dropout", "embedding", "walk")

# Of the training sequence ("train_...") and of the held-out one.
METRICS = (
    "train_loss",
    "train_bayes_nll",
    "train_kl",
    "train_accuracy",
    "train_predictive_entropy",
    "train_attention_entropy",
    "heldout_loss",
    "heldout_bayes_nll",
    "heldout_kl",
    "accuracy",
    "predictive_entropy",
    "attention_entropy",
)


class Problem(NamedTuple):
    """What one seed is given: where it starts, what it trains on, what judges it."""

    params: Params
    train: Batch  # (batch_size, ...)
    heldout: Batch
    log_bayes_train: jax.Array  # (batch_size, T, C), nats
    log_bayes_heldout: jax.Array  # (T, C), nats


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
    curves: dict[str, np.ndarray]  # metric -> (arm, seed, evaluation), NaN if to come
    # (arm, seed): the last step after which all weights were finite, if the next undid
    # it; or where a metric was not finite, if that was before; -1: neither.
    diverged_step: np.ndarray
    # What `trajectory.look` saw beside curves, if anything.
    traits: dict[str, np.ndarray]  # (arm, seed)
    # (arm, snapshot seed, snapshot, ...), of the snapshot seeds that are among these.
    snapshots: dict[str, np.ndarray]


class Round(NamedTuple):
    """Seeds that train side by side, in the middle."""

    step: np.ndarray  # steps done, a scalar
    states: dict[str, schedules.State]  # by arm; leaves lead with slot, and point
    # Of every evaluation so far the weights by arm, lead with slot; none of a grid, or
    # if nothing is looked at.
    trail: tuple[dict[str, Params], ...]
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
    seen: trajectory.Seen | None  # shapes of a seed's; None if nothing is looked at
    snapshots: dict[str, tuple[int, ...]]  # likewise; empty if there are none
    begin: Callable  # ids -> problems, initial states by structure; lead with slot
    train: dict[schedules.Structure, Callable]  # -> states, last finite step
    evaluate: dict[bool, Callable]  # whether values have a norm -> to metrics
    look: dict[bool, Callable]  # the same -> to `trajectory.Seen`; empty of a grid
    picture: dict[bool, Callable]  # the same -> of one seed, to snapshots, if any
    compiled: tuple[jax.stages.Compiled, ...]  # the programs themselves, of a batch


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a named stream, one of `_STREAMS`."""
    return jax.random.fold_in(key, _STREAMS.index(name))


def evaluation_steps(config: ConfigDict) -> np.ndarray:
    """Steps after which metrics are taken: 0, every `eval_every`, and the last."""
    return np.append(np.arange(0, config.steps, config.eval_every), config.steps)


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
      ConfigError: there is not enough memory.
    """
    seed_bytes = _seed_bytes(config)
    on_cpu = devices[0].platform == "cpu"
    device_bytes = memory.of_device(devices[0])
    here = -(-config.seeds // jax.process_count())
    count = min(len(devices), here)
    share_it = count * processes.neighbours() if on_cpu else 1
    if device_bytes is None:
        fit = here if together else 1  # on each device, at once
    else:
        fit = int(memory_share * device_bytes) // share_it // seed_bytes
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
            " seeds together, or a smaller task"
        )
    return Plan(tuple(devices[:count]), together, workers, seed_bytes, device_bytes)


def build(config: ConfigDict, plan: Plan) -> Sweep:
    """Compiles the programs.

    Rates, step numbers, ids and states are arguments of the programs, so arms that
    differ in nothing else share one, and so do all seeds and points of a grid.

    Args:
      config: checked, see `config.check`.
      plan: from `plan`.
    """
    problem, states = _shapes(config)
    programs = _programs(config, problem, states)
    lowered = {
        name: _lower_one(*program) if name[0] == "picture" else _lower(plan, *program)
        for name, program in programs.items()
    }
    with ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
        ready = pool.map(lambda program: program.compile(), lowered.values())
        compiled = dict(zip(lowered, ready, strict=True))

    workers = ThreadPoolExecutor(plan.workers)

    def of_kind(kind: str) -> dict:
        return {which: p for (name, which), p in compiled.items() if name == kind}

    def over_slots(kind: str) -> dict:
        return {
            which: _spread(plan, workers, program)
            for which, program in of_kind(kind).items()
        }

    def shapes_of(kind: str):
        found = [p.out_info for name, p in lowered.items() if name[0] == kind]
        return jax.tree.map(lambda leaf: leaf.shape, found[0]) if found else None

    (first,) = over_slots("begin").values()
    seen = shapes_of("look")
    if seen is not None:
        seen = trajectory.Seen(
            *({n: shape[1:] for n, shape in part.items()} for part in seen)
        )
    return Sweep(
        config,
        plan,
        {arm: states[_structure(config, arm)] for arm in config.run_arms},
        seen,
        shapes_of("picture") or {},
        # A round is drawn once, though every stretch of it asks.
        functools.lru_cache(1)(lambda ids: first((), np.array(ids, np.uint32))),
        over_slots("train"),
        over_slots("evaluate"),
        over_slots("look"),
        of_kind("picture"),
        tuple(compiled.values()),
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
    params = {arm: state.params for arm, state in sweep.states.items()}
    rounds = tuple(
        Round(np.array(0), sweep.states, (params,) * len(round_["trail"]), kept)
        for round_ in carry["rounds"].values()
    )
    return Carry(np.array(0), (kept,) * len(carry["done"]), rounds)


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
        length = shown_length(config, config.snapshot_length)
        mask = head_mask(config, length)
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
    found, at_start = [], {}  # every arm starts from the same weights
    for arm in config.run_arms:
        norm = _structure(config, arm).value_norm
        values = at_start.get(norm) if index == 0 else None
        if values is None:
            params = round_.states[arm].params
            metrics = sweep.evaluate[norm](shared, ids, params, problems)
            values = np.stack([metrics[name] for name in METRICS], axis=1)
            at_start[norm] = values
        found.append(values)
    values = np.stack(found, axis=1)  # (slot, arm, metric, point)
    values = np.moveaxis(processes.gather(values)[:count], 0, -1)  # seeds last
    curves = {name: curve.copy() for name, curve in round_.kept.curves.items()}
    for which, name in enumerate(METRICS):
        curves[name][..., index] = values[:, which]

    since = round_.kept.diverged_step
    if diverged is not None:
        new = processes.gather(np.stack(list(diverged.values()), axis=1))[:count]
        new = np.moveaxis(new, 0, -1)
        since = np.where(since < 0, new, since)
    finite = np.isfinite(values).all(axis=1)
    since = np.where((since < 0) & ~finite, np.int32(round_.step), since)

    trail = round_.trail
    if sweep.seen is not None or sweep.snapshots:
        trail += ({arm: round_.states[arm].params for arm in config.run_arms},)
    kept = round_.kept._replace(curves=curves, diverged_step=since.astype(np.int32))
    return round_._replace(trail=trail, kept=kept)


def _look_back(sweep: Sweep, round_: Round, problems: Problem) -> Round:
    """Keeps what is to be seen of a finished round along its way."""
    config, kept = sweep.config, round_.kept
    if sweep.seen is not None:
        ids, count = _slots(sweep.plan, kept.seeds), len(kept.seeds)
        shown, of_bayes = _shown(config, problems, config.diagnostics_length)
        found = [
            sweep.look[_structure(config, arm).value_norm](
                (), ids, _way(round_.trail, arm), shown, of_bayes
            )
            for arm in config.run_arms
        ]
        seen = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *found)
        seen = jax.tree.map(
            lambda leaf: np.swapaxes(leaf[:count], 0, 1), processes.gather(seen)
        )
        kept = kept._replace(curves=kept.curves | seen.curves, traits=seen.traits)
    if sweep.snapshots:
        kept = kept._replace(snapshots=_pictures(sweep, round_, problems))
    return round_._replace(kept=kept)


def _way(trail: Sequence[dict[str, Params]], arm: str) -> Params:
    """Weights of an arm at some evaluations, (slot, evaluation, ...)."""
    ways = [evaluation[arm] for evaluation in trail]
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *ways)


def _pictures(sweep: Sweep, round_: Round, problems: Problem) -> dict[str, np.ndarray]:
    """Snapshots (arm, pictured seed, snapshot, ...) of a round, for every process.

    Each draws its own seeds, one by one: they are few.
    """
    config, slots = sweep.config, sweep.plan.slots
    shown, _ = _shown(config, problems, config.snapshot_length)
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
            picture = sweep.picture[_structure(config, arm).value_norm]
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
    last = len(evaluation_steps(config)) - 1
    return (
        np.unique(np.linspace(0, last, config.snapshots).round()).astype(int).tolist()
    )


def _nothing_kept(sweep: Sweep, seeds: np.ndarray) -> Kept:
    config = sweep.config
    of_seed = (len(config.run_arms), *_over_points(config), len(seeds))
    count = len(evaluation_steps(config))
    curves, traits = dict.fromkeys(METRICS, (count,)), {}
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
        together("curves", -2),
        np.concatenate([part.diverged_step for part in parts], axis=-1),
        together("traits", -1),
        together("snapshots", 1),
    )
    return _pick(config, joined, np.argsort(seeds))


def _pick(config: ConfigDict, kept: Kept, which: np.ndarray) -> Kept:
    """Some of the seeds, by their places."""
    pictured = _pictured(config, kept.seeds)
    place = np.cumsum(pictured) - 1  # of a pictured seed among its likes
    places = place[which][pictured[which]]
    return Kept(
        kept.seeds[which],
        {name: curve[..., which, :] for name, curve in kept.curves.items()},
        kept.diverged_step[..., which],
        {name: trait[..., which] for name, trait in kept.traits.items()},
        {name: array[:, places] for name, array in kept.snapshots.items()},
    )


def _slots(plan: Plan, seeds: np.ndarray) -> np.ndarray:
    """Who sits in this process's slots; where no seed is left, the last one again."""
    mine = jax.process_index() * plan.slots + np.arange(plan.slots)
    return seeds[np.minimum(mine, len(seeds) - 1)].astype(np.uint32)


# --- one seed


def draw_problem(config: ConfigDict, seed_id: jax.Array) -> Problem:
    """The problem of a seed; it depends on nothing else that runs."""
    seed_key, task = _seed_key(config, seed_id), _task(config, seed_id)
    params = attention.init_params(
        stream(seed_key, "init"),
        d_x=config.task.d_x,
        d_k=config.model.d_k,
        d_v=config.model.d_v,
        num_classes=catalogue.TASKS[config.task.name].num_classes(config.task),
        scale=config.model.init_scale,
        bias=config.model.bias,
    )
    train = draw_batch(config, seed_id, 0)
    heldout = task.sample(stream(seed_key, "eval"))
    return Problem(
        params, train, heldout, jax.vmap(task.bayes)(train), task.bayes(heldout)
    )


def _begin(
    config: ConfigDict, shared: tuple, seed_id: jax.Array
) -> tuple[Problem, dict[schedules.Structure, schedules.State]]:
    del shared
    problem = draw_problem(config, seed_id)
    # Whatever its rates, a schedule starts the same.
    return problem, {
        structure: _schedule(
            config, structure, config_lib.rates(config.arms[arm])
        ).init(problem.params)
        for structure, arm in _arms(config).items()
    }


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
        schedule = _schedule(config, structure, rates)
        return _train(config, schedule, fresh, begin, end, seed_id, state, batch)

    return _map_points(config, at_point, fresh, rates, state)


def _evaluate_points(
    config: ConfigDict,
    value_norm: bool,
    shared: tuple,
    seed_id: jax.Array,
    params: Params,
    problem: Problem,
) -> dict[str, jax.Array]:
    step, fresh = shared

    def at_point(fresh, params):
        return _evaluate(config, value_norm, step, fresh, seed_id, params, problem)

    return _map_points(config, at_point, fresh, params)


def _map_points(config: ConfigDict, function: Callable, fresh, *own):
    """function(fresh, *own) at each point of the grid, or where there is none."""
    if fresh is None:
        return function(config.fresh, *own)
    return jax.lax.map(lambda point: function(*point), (fresh, *own))


def _look(
    config: ConfigDict,
    value_norm: bool,
    shared: tuple,
    seed_id: jax.Array,
    trail: Params,
    shown: Batch,
    of_bayes: tuple[Batch, jax.Array],
) -> trajectory.Seen:
    del shared
    mask = head_mask(config, len(shown.inputs))
    key = stream(_seed_key(config, seed_id), "walk")
    seen = trajectory.look(trail, shown, mask, key, value_norm=value_norm)
    whole, log_bayes = of_bayes
    traits = {
        "bayes_accuracy": losses.tied_accuracy(log_bayes, whole.targets, whole.weights),
        "bayes_predictive_entropy": losses.predictive_entropy(log_bayes, whole.weights),
    }
    return seen._replace(traits=seen.traits | traits)


def _picture(
    config: ConfigDict, value_norm: bool, shared: tuple, trail: Params, shown: Batch
) -> dict[str, jax.Array]:
    del shared
    mask = head_mask(config, len(shown.inputs))
    return trajectory.picture(trail, shown, mask, value_norm=value_norm)


def shown_length(config: ConfigDict, length: int) -> int:
    """How many positions are looked at, of so many asked for.

    All where a head looks everywhere, or it would be another.
    """
    task = catalogue.TASKS[config.task.name]
    positions = task.positions(config.task)
    return min(length, positions) if task.causal else positions


def _shown(
    config: ConfigDict, problems: Problem, length: int
) -> tuple[Batch, tuple[Batch, jax.Array]]:
    """The first positions of what is looked at, and all of it with exact Bayes.

    Of problems that lead with a slot.
    """
    whole, log_bayes = problems.heldout, problems.log_bayes_heldout
    if catalogue.TASKS[config.task.name].shown == "train":
        train = problems.train, problems.log_bayes_train
        whole, log_bayes = jax.tree.map(lambda leaf: leaf[:, 0], train)
    size = shown_length(config, length)
    return jax.tree.map(lambda leaf: leaf[:, :size], whole), (whole, log_bayes)


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
    value_norm: bool,
    step: jax.Array,
    fresh: jax.Array | bool,
    seed_id: jax.Array,
    params: Params,
    problem: Problem,
) -> dict[str, jax.Array]:
    def last_trained_on() -> tuple[Batch, jax.Array]:
        batch = draw_batch(config, seed_id, jnp.maximum(step - 1, 0))
        return batch, jax.vmap(_task(config, seed_id).bayes)(batch)

    train, log_bayes_train = _only_if(
        fresh, last_trained_on, (problem.train, problem.log_bayes_train)
    )
    on_train = jax.lax.map(
        lambda x: _scores(config, value_norm, params, *x), (train, log_bayes_train)
    )
    heldout = _scores(
        config, value_norm, params, problem.heldout, problem.log_bayes_heldout
    )
    metrics = {f"train_{name}": jnp.mean(value) for name, value in on_train.items()}
    metrics |= {
        f"heldout_{name}": heldout.pop(name) for name in ("loss", "bayes_nll", "kl")
    }
    return metrics | heldout


def _scores(
    config: ConfigDict,
    value_norm: bool,
    params: Params,
    batch: Batch,
    log_bayes: jax.Array,
) -> dict[str, jax.Array]:
    mask = head_mask(config, len(batch.inputs))
    readout = attention.readout(params, batch.inputs, mask, value_norm=value_norm)
    logit, weights = readout.logit, batch.weights
    share = losses.position_shares(weights, len(logit), logit.dtype)
    return {
        "loss": losses.cross_entropy(logit, batch.targets, weights),
        "bayes_nll": losses.cross_entropy(log_bayes, batch.targets, weights),
        "kl": losses.kl_to_bayes(log_bayes, logit, weights),
        "accuracy": losses.accuracy(logit, batch.targets, weights),
        "predictive_entropy": losses.predictive_entropy(logit, weights),
        "attention_entropy": jnp.vdot(share, readout.attention_entropy),
    }


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


def head_mask(config: ConfigDict, length: int) -> np.ndarray | None:
    """What a head of the config's task may look at; None for everything."""
    causal = catalogue.TASKS[config.task.name].causal
    return attention.causal_mask(length) if causal else None


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


def _schedule(
    config: ConfigDict, structure: schedules.Structure, rates: dict
) -> schedules.Schedule:
    causal = catalogue.TASKS[config.task.name].causal
    wiring = schedules.Wiring(causal, structure.value_norm, structure.dropout_rate)
    gradient = functools.partial(schedules.GRADIENTS[config.gradient], wiring=wiring)
    mix = functools.partial(schedules.MIXES[config.gradient], causal=causal)
    return schedules.build(structure, rates, gradient, mix)


# --- where seeds run


def _seed_bytes(config: ConfigDict) -> int:
    """What a seed needs at most: problem and states, and what a program works on."""
    problem, states = _shapes(config)
    traced = [
        jax.make_jaxpr(function)(shared, *own)
        for function, shared, *own in _programs(config, problem, states).values()
    ]
    held = [problem, *(states[_structure(config, arm)] for arm in config.run_arms)]
    if config.get("diagnostics_length") or snapshot_indices(config):
        # Weights at every evaluation.
        held += [problem.params] * (
            len(evaluation_steps(config)) * len(config.run_arms)
        )
    return sum(map(memory.size, held)) + max(map(memory.peak, traced))


def _programs(config: ConfigDict, problem: Problem, states: dict) -> dict[tuple, tuple]:
    """What a sweep compiles, each as (function, shared, *of one seed), see `_lower`.

    By kind and what it is for: ("begin", None), ("train", structure), ("evaluate",
    whether values have a norm), for diagnostics ("look", the same), and for snapshots
    ("picture", the same), which is of one seed alone. The shapes are from `_shapes`.
    """
    ids, step = jax.ShapeDtypeStruct((), np.uint32), np.int32(0)
    programs = {("begin", None): (functools.partial(_begin, config), (), ids)}
    for structure, arm in _arms(config).items():
        train = functools.partial(_train_points, config, structure)
        shared = _rates(config, arm), _fresh(config), step, step
        own = ids, states[structure], problem.train
        programs["train", structure] = train, shared, *own
    params = _at_every_point(config, problem.params)
    for norm in sorted({structure.value_norm for structure in _arms(config)}):
        evaluate = functools.partial(_evaluate_points, config, norm)
        shared = step, _fresh(config)
        programs["evaluate", norm] = evaluate, shared, ids, params, problem
        if config.get("diagnostics_length"):
            own = ids, _stacked(problem.params, len(evaluation_steps(config)))
            own += _shown_shapes(config, problem, config.diagnostics_length)
            programs["look", norm] = functools.partial(_look, config, norm), (), *own
        if snapshot_indices(config):
            trail = _stacked(problem.params, len(snapshot_indices(config)))
            shown, _ = _shown_shapes(config, problem, config.snapshot_length)
            picture = functools.partial(_picture, config, norm)
            programs["picture", norm] = picture, (), trail, shown
    return programs


def _shown_shapes(config: ConfigDict, problem: Problem, length: int) -> tuple:
    """Shapes of `_shown` of one seed."""
    several = jax.eval_shape(
        lambda problems: _shown(config, problems, length), _stacked(problem, 1)
    )
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
