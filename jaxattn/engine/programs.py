"""Compiled programs of an experiment, and calls of them over all slots of a process.

Each is compiled for a batch of seeds, sharded over devices; several batches run at the
same time, a thread each. What leads with slots is a list of batches, on the devices.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxattn.engine import memory, seed
from jaxattn.engine.records import Layout
from jaxattn.experiments import Experiment

Batches = list  # of trees whose leaves lead with the seeds of a batch


class Plan(NamedTuple):
    """Who trains how many seeds at once."""

    devices: tuple[jax.Device, ...]  # of this process, over which a batch is sharded
    together: int  # seeds of a batch on each
    workers: int  # batches at the same time, a thread each

    @property
    def batch(self) -> int:
        """Seeds that a program is compiled for."""
        return len(self.devices) * self.together

    @property
    def slots(self) -> int:
        """Seeds at once in this process."""
        return self.batch * self.workers


class Program(NamedTuple):
    """A function of one seed with examples of its arguments."""

    function: Callable  # of (*shared, *own)
    shared: tuple  # what all seeds share
    own: tuple  # shapes of what is one seed's


class Sketch(NamedTuple):
    """Shapes of one seed's, before anything is compiled."""

    problem: Any
    states: dict[str, Any]  # by arm, at every point of a grid
    programs: dict[tuple[str, Hashable], Program]
    trail: dict[str, Any]  # by arm, of one evaluation; of arms that are retraced
    layout: Layout


class Programs(NamedTuple):
    """An experiment, compiled."""

    experiment: Experiment
    plan: Plan
    sketch: Sketch
    keeps_weights: bool  # of finished seeds
    begin: Callable  # (ids) -> batches of problem and states by program
    # By program or reading of an arm: (shared, ids, *own) -> batches.
    train: Mapping[Hashable, Callable]
    evaluate: Mapping[Hashable, Callable]
    retrace: Mapping[Hashable, Callable]  # empty if nothing is to be retraced
    snapshots: Mapping[Hashable, Callable]  # of one seed; empty if there are none


def sketch(experiment: Experiment) -> Sketch:
    """Traces, but does not compile, all that one seed needs."""
    seed_id, step = jax.ShapeDtypeStruct((), np.uint32), np.int32(0)
    begin = functools.partial(seed.begin, experiment)
    problem, states = jax.eval_shape(begin, seed_id)
    states = {p: at_every_point(experiment, state) for p, state in states.items()}
    options = seed.options(experiment)
    programs = {("begin", None): Program(begin, (), (seed_id,))}
    for name, arm in seed.by_program(experiment).items():
        train = functools.partial(seed.train, experiment, arm)
        shared = arm.rates, options, step, step
        own = seed_id, states[name], problem
        programs["train", name] = Program(train, shared, own)

    evaluated, retraced, pictured = [], [], []
    trail, indices = {}, experiment.snapshot_indices()
    for name, arm in seed.by_reading(experiment).items():
        params = states[arm.program].params
        evaluate = functools.partial(seed.evaluate, experiment, arm)
        program = Program(evaluate, (step, options), (seed_id, params, problem))
        programs["evaluate", name] = program
        found = jax.eval_shape(evaluate, *program.shared, *program.own)
        evaluated.append(found.metrics)
        own_trail = params if found.trail is None else found.trail
        if arm.retrace is not None:
            trail[name] = own_trail
            all_of_it = stacked(own_trail, experiment.evaluation_count)
            retrace = functools.partial(seed.retrace, experiment, arm)
            program = Program(retrace, (), (seed_id, all_of_it, params, problem))
            programs["retrace", name] = program
            retraced.append(jax.eval_shape(retrace, *program.own))
        if arm.snapshots is not None:
            trail[name] = own_trail
            program = Program(
                arm.snapshots, (), (stacked(own_trail, len(indices)), problem)
            )
            programs["snapshots", name] = program
            pictured.append(jax.eval_shape(arm.snapshots, *program.own))

    ahead = len(experiment.over_points)
    count = experiment.evaluation_count
    curves = _largest(evaluated, ahead)
    layout = Layout(
        {name: (count, *shape) for name, shape in curves.items()}
        | _largest([found.curves for found in retraced], 0),
        _largest([found.traits for found in retraced], 0),
        _largest(pictured, 0),
    )
    return Sketch(
        problem,
        {arm.name: states[arm.program] for arm in experiment.arms},
        programs,
        {a.name: trail[a.reading] for a in experiment.arms if a.reading in trail},
        layout,
    )


def build(
    experiment: Experiment,
    sketched: Sketch,
    plan: Plan,
    *,
    breakable: Callable[[], AbstractContextManager],
) -> dict[tuple[str, Hashable], jax.stages.Compiled]:
    """Compiles the programs of a sketch for the batches of a plan.

    Rates, step numbers, ids and states are arguments of the programs, so arms that
    differ in nothing else share one, and so do all seeds and points of a grid.

    Args:
      experiment: that they are of.
      sketched: from `sketch`.
      plan: which devices, and how many seeds of a batch on each.
      breakable: a context around the wait for the compiler; what it raises leaves that
        at work.
    """
    lowered = {
        name: (
            jax.jit(program.function).lower(*program.own)
            if name[0] == "snapshots"
            else _lower(plan, program)
        )
        for name, program in sketched.programs.items()
    }
    pool = ThreadPoolExecutor()  # XLA compiles outside Python's lock
    try:
        with breakable():
            ready = pool.map(lambda program: program.compile(), lowered.values())
            return dict(zip(lowered, ready, strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def callable_programs(
    experiment: Experiment,
    sketched: Sketch,
    plan: Plan,
    compiled: Mapping[tuple[str, Hashable], jax.stages.Compiled],
    *,
    keep_weights: bool,
) -> Programs:
    """Makes compiled programs of a batch callable over all slots.

    Args:
      experiment: that they are of.
      sketched: from `sketch`.
      plan: that they were compiled for; how many batches run at the same time.
      compiled: from `build`.
      keep_weights: whether what each arm ended with is recorded.
    """
    workers = ThreadPoolExecutor(plan.workers)

    def of_kind(kind: str) -> dict[Hashable, jax.stages.Compiled]:
        return {which: p for (name, which), p in compiled.items() if name == kind}

    def over_slots(kind: str) -> dict[Hashable, Callable]:
        return {n: _over_slots(workers, p) for n, p in of_kind(kind).items()}

    (begin,) = over_slots("begin").values()
    return Programs(
        experiment,
        plan,
        sketched,
        keep_weights,
        functools.partial(begin, ()),
        over_slots("train"),
        over_slots("evaluate"),
        over_slots("retrace"),
        of_kind("snapshots"),
    )


def working_bytes(
    compiled: Mapping[tuple[str, Hashable], jax.stages.Compiled],
) -> int:
    """Bytes on a device that the hungriest program needs beside its arguments."""
    return max(map(memory.of_program, compiled.values()))


def at_every_point(experiment: Experiment, tree: Any, axis: int = 0) -> Any:
    """Repeats arrays, or shapes, at an axis for the points of a grid, if there is one.

    Args:
      experiment: with or without a grid.
      tree: of arrays or shapes.
      axis: that the points get.
    """
    for count in experiment.over_points:

        def repeated(leaf, n=count):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                shape = (*leaf.shape[:axis], n, *leaf.shape[axis:])
                return jax.ShapeDtypeStruct(shape, leaf.dtype)
            return np.repeat(np.expand_dims(leaf, axis), n, axis=axis)

        tree = jax.tree.map(repeated, tree)
    return tree


def stacked(tree: Any, count: int) -> Any:
    """Shapes of so many of a kind."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), tree
    )


def split(plan: Plan, tree: Any) -> Batches:
    """Splits what leads with all slots into batches."""
    return [
        jax.tree.map(lambda leaf, f=first: leaf[f : f + plan.batch], tree)
        for first in range(0, plan.slots, plan.batch)
    ]


def fetch(batches: Batches) -> Any:
    """Fetches batches from the devices; leaves lead with all slots."""
    return jax.tree.map(
        lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *batches
    )


def _largest(found: list[dict[str, Any]], ahead: int) -> dict[str, tuple[int, ...]]:
    """The shape that holds any of several, after so many axes, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, leaf in (item for metrics in found for item in metrics.items()):
        own = leaf.shape[ahead:]
        shapes[name] = tuple(map(max, own, shapes.get(name, own)))
    return {name: shapes[name] for name in sorted(shapes)}


def _lower(plan: Plan, program: Program) -> jax.stages.Lowered:
    """Lowers a program for a batch, sharded over the devices.

    With one seed on a device nothing is batched: XLA fuses batches of other sizes in
    other ways, which would be other bits.

    Args:
      plan: which devices, and how many seeds of a batch on each.
      program: of one seed.

    Returns:
      Lowered (shared, *own leading with the seed of a batch) -> results alike.
    """

    def on_device(shared, *own):
        if plan.together > 1:
            return jax.vmap(functools.partial(program.function, *shared))(*own)
        one = jax.tree.map(lambda leaf: leaf[0], own)
        result = program.function(*shared, *one)
        return jax.tree.map(lambda leaf: leaf[None], result)

    dealt, all_of_it = PartitionSpec("seed"), PartitionSpec()
    mesh = Mesh(np.array(plan.devices), ("seed",))
    specs = (all_of_it, *(dealt for _ in program.own))
    jitted = jax.jit(
        jax.shard_map(
            on_device, mesh=mesh, in_specs=specs, out_specs=dealt, check_vma=False
        ),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
        out_shardings=NamedSharding(mesh, dealt),
    )
    return jitted.lower(program.shared, *stacked(program.own, plan.batch))


def _over_slots(workers: ThreadPoolExecutor, compiled: Callable) -> Callable:
    """Makes (shared, batches of ids, *batches) -> batches from a program of a batch."""

    def over_slots(shared, ids: Batches, *own: Batches) -> Batches:
        batches = list(zip(ids, *own, strict=True))
        places = {tuple(of_batch.tolist()): n for n, of_batch in enumerate(ids)}

        def one_batch(place: int):
            # Waits here, so that as many batches run at once as there are workers.
            return jax.block_until_ready(compiled(shared, *batches[place]))

        # Slots alike are done once.
        done = workers.map(one_batch, places.values())
        done = dict(zip(places, done, strict=True))
        return [done[tuple(of_batch.tolist())] for of_batch in ids]

    return over_slots
