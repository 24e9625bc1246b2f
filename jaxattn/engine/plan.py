"""How many seeds run at once: from what one of them needs, and what there is."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxattn.engine import memory, processes, programs
from jaxattn.engine.programs import Plan, Programs, Sketch
from jaxattn.experiments import Experiment
from jaxattn.fields import ConfigError

# Of the memory of a machine, that a run may use beside what trains.
_HOST_SHARE = 0.5
# How often what is recorded is there at once: in parts, joined, sorted and written.
_RECORD_COPIES = 4
_GIB = 2**30


class Settings(NamedTuple):
    """How a run is done; nothing of it changes a number on a CPU."""

    together: int = 0  # seeds of a batch on each device; 0: what is best
    workers: int = 1  # batches at the same time; fewer if memory or seeds are too few
    memory_share: float = 0.5  # of a device's memory, that may be used
    checkpoint_seconds: float = 60.0  # between checkpoints, at the next evaluation
    keep_weights: bool = False  # whether what each arm ends with is recorded


class Room(NamedTuple):
    """What a seed needs, and what there is for it."""

    seed_bytes: int  # on a device
    device_bytes: int | None  # of a device, if it says; those of a CPU share it


def compiled(
    experiment: Experiment,
    devices: Sequence[jax.Device],
    settings: Settings,
    *,
    breakable: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> tuple[Programs, Room]:
    """Compiles an experiment for as many seeds at once as there is room for.

    On a CPU, one device, one seed in a batch and a worker for each core is best: twice
    as fast as splitting each operation over 2 cores (measured; its cache holds one
    seed), as fast as a device for each core, and the numbers depend on neither the
    workers nor the other seeds, to the last bit. For several devices or larger batches
    XLA compiles other fusions, and they agree to rounding.

    Args:
      experiment: to compile.
      devices: of this process; no more are used than there are seeds.
      settings: of the user; processes on one machine share the memory of its CPU.
      breakable: a context around the wait for the compiler; what it raises leaves that
        at work.

    Returns:
      Programs, with as many slots in every process, and Room.

    Raises:
      ConfigError: there is not enough memory, of devices or beside them.
    """
    if not 0 <= settings.memory_share <= 1:  # also of NaN
        raise ConfigError(
            f"memory_share={settings.memory_share!r}: must be a number from 0 to 1"
        )
    neighbours = processes.neighbours()
    room = int(_HOST_SHARE * memory.of_host()) // neighbours
    room = int(processes.gather(np.array([room])).min())  # or one alone would stop
    for need in experiment.needs:
        if need.size > room:
            raise ConfigError(need.most(room))
    sketched = programs.sketch(experiment)
    device_bytes = memory.of_device(devices[0])
    most = math.inf
    if device_bytes is not None:
        on_cpu = devices[0].platform == "cpu"
        shared_by = neighbours if on_cpu else 1
        most = settings.memory_share * device_bytes / shared_by
    # In this order, so that it is the field to change that is named.
    own = memory.size([sketched.problem, sketched.states])
    if own > most:
        raise _too_large(experiment, settings, own)
    _require_record_room(experiment, sketched, room)
    held = own + memory.size(sketched.trail) * experiment.evaluation_count
    if held > most:  # compiling would take its time
        raise _too_large(experiment, settings, held)

    here = -(-experiment.seeds // jax.process_count())
    devices = tuple(devices[: min(len(devices), here)])
    on_cpu = devices[0].platform == "cpu"
    together = settings.together or 1
    plan = Plan(devices, together, 1)
    build = {"breakable": breakable}
    automatic = settings.together == 0 and not on_cpu
    if automatic:  # what one seed needs says how many fit, and then all are compiled
        plan = Plan(devices[:1], 1, 1)
    built = programs.build(experiment, sketched, plan, **build)
    # Devices of a CPU share its memory.
    share_it = len(plan.devices) if on_cpu else 1
    working = programs.working_bytes(built)
    seed_bytes = held + working // plan.together
    fit = here if math.isinf(most) else int(most / share_it) // seed_bytes
    if automatic:  # in as few rounds as can be, all of about one size
        rounds = -(-here // (len(devices) * max(fit, 1)))
        together = -(-here // (len(devices) * rounds))
    workers = min(
        settings.workers, fit // together, -(-here // (len(devices) * together))
    )
    agreed = processes.gather(np.array([[len(devices), together, workers]]))
    count, together, workers = agreed.min(axis=0).tolist()
    if workers == 0:
        raise _too_large(experiment, settings._replace(together=together), seed_bytes)
    final = Plan(devices[:count], together, workers)
    if final.devices != plan.devices or final.together != plan.together:
        built = programs.build(experiment, sketched, final, **build)
    ready = programs.callable_programs(
        experiment, sketched, final, built, keep_weights=settings.keep_weights
    )
    return ready, Room(seed_bytes, device_bytes)


def _require_record_room(experiment: Experiment, sketched: Sketch, room: int) -> None:
    """Raises ConfigError where what is recorded of all seeds does not fit."""
    layout, runs = sketched.layout, len(experiment.arms)
    points = math.prod(experiment.over_points)

    def size(shapes) -> int:
        return 4 * runs * points * sum(map(math.prod, shapes.values()))

    evaluations = size(layout.curves) * experiment.seeds
    text = "a larger one, or fewer steps, seeds or arms"
    _require(experiment, "eval_every", evaluations, room, text)
    if experiment.snapshots is not None:
        seeds = len(experiment.snapshots.seeds)
        text = "a smaller one, or fewer snapshots, snapshot_seeds or arms"
        field = experiment.snapshots.field
        _require(experiment, field, size(layout.snapshots) * seeds, room, text)


def _require(
    experiment: Experiment, field: str, size: int, room: int, text: str
) -> None:
    needed = _RECORD_COPIES * size
    if needed > room:
        value = experiment.config
        for part in field.split("."):
            value = value[part]
        raise ConfigError(
            f"{field}={value!r}: what is recorded of all seeds needs"
            f" {needed / _GIB:.3g} GiB, and there are {room / _GIB:.3g} for it; must be"
            f" {text}"
        )


def _too_large(experiment: Experiment, settings: Settings, size: int) -> ConfigError:
    together = max(settings.together, 1)
    return ConfigError(
        f"memory_share={settings.memory_share:g}: {together} of {experiment.seeds}"
        f" seeds of {size / _GIB:.3g} GiB do not fit; must be a larger share; or use"
        " fewer seeds together, shorter sequences or a larger eval_every"
    )
