"""A run from an experiment to its directory: compiled, resumed, trained, written.

With several processes each calls `train`; process 0 alone prints and writes.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import serialization

from jaxattn.engine import plan, processes, progress, rounds
from jaxattn.engine.plan import Room, Settings
from jaxattn.engine.programs import Programs
from jaxattn.engine.progress import StoppedError
from jaxattn.engine.records import Records, is_snapshot_seed
from jaxattn.engine.rounds import Carry
from jaxattn.experiments import Experiment
from jaxattn.fields import ConfigError
from jaxattn.runs import (
    Run,
    RunError,
    checkpoints,
    directory,
    provenance,
    weights,
    write,
)

# Adds files of a finished run to a stage: (stage, run).
Finish = Callable[[Path, Run], None]
_DEFAULTS = Settings()


class NotCompiledError(StoppedError):
    """A signal came while programs were compiled, which goes on in threads."""


def train(
    experiment: Experiment,
    *,
    workdir: Path | str,
    settings: Settings = _DEFAULTS,
    finish: Finish | None = None,
) -> Run | None:
    """Trains every arm on every seed, or goes on, and writes the run directory.

    Args:
      experiment: from `experiments.resolve`.
      workdir: to write to; made if it is not there.
      settings: how to do it.
      finish: adds files to the directory before it counts as finished, such as
        `views.publish.tables`.

    Returns:
      The run, in process 0; None elsewhere. `wall_seconds` is among its attributes.

    Raises:
      ConfigError: the experiment asks for more memory than there is, or for evidence
        that its task calls impossible.
      RunError: the directory cannot be used or written.
      ProcessError: the processes differ, or one is gone.
      StoppedError: a signal came.
    """
    workdir = Path(workdir)
    if not settings.checkpoint_seconds >= 0:  # also of NaN, after which none is due
        raise ConfigError(
            f"checkpoint_seconds={settings.checkpoint_seconds!r}: must be a number from"
            " 0; inf for none but that of a run that is stopped"
        )
    record = recorded(experiment)
    compiled_first = progress.signals_kept("when all is compiled")
    with compiled_first as signals, contextlib.ExitStack() as stack:
        processes.require_same(
            "config, code and versions", json.dumps(record, sort_keys=True)
        )
        held = directory.claimed(workdir, record)  # by process 0, for all
        processes.led(lambda: stack.enter_context(held))
        content = processes.led(lambda: checkpoints.read(workdir))
        content = processes.hand_out(content or b"")
        _say(_headline(experiment))
        started = time.perf_counter()
        programs, room = _compiled(experiment, settings, signals, workdir)
        _say(_seeds_at_once(programs, room))
        compiled = time.perf_counter()
        carry, before = resumed(programs, content)
        if content:
            _say(f"going on from {_place(experiment, carry)}")
        signals.until = "at the next evaluation"

        def save(carry: Carry, seconds: float) -> None:
            keep(programs, record, workdir, carry, before + seconds)

        carry = _advance(programs, carry, signals, settings.checkpoint_seconds, save)
        signals.until = "when all numbers are written"
        wall = {"compile": compiled - started, "run": _since(compiled) + before}
        found = rounds.finished(experiment, carry)
        return processes.led(
            lambda: _write(experiment, workdir, record, found, wall, finish)
        )


def recorded(experiment: Experiment) -> dict[str, Any]:
    """All that a run's numbers depend on, as it stands in config.json."""
    own = {"config": dict(experiment.config), "facts": dict(experiment.facts)}
    return write.plain(own) | provenance.provenance()


def _compiled(
    experiment: Experiment,
    settings: Settings,
    signals: progress.Signals,
    workdir: Path,
) -> tuple[Programs, Room]:
    on_cpu = jax.default_backend() == "cpu"
    # Of several processes none may leave the others alone.
    alone = jax.process_count() == 1
    try:
        return plan.compiled(
            experiment,
            jax.local_devices()[: 1 if on_cpu else None],
            settings,
            breakable=signals.at_once if alone else contextlib.nullcontext,
        )
    except StoppedError:
        raise NotCompiledError(str(workdir)) from None


def resumed(programs: Programs, content: bytes) -> tuple[Carry, float]:
    """Takes up a run in the middle; also gives the seconds that it took.

    Args:
      programs: of the same experiment.
      content: from `checkpoints.read`; empty for a run that has not begun.

    Raises:
      RunError: weights were recorded, and are not to be, or the reverse.
    """
    if not content:
        return rounds.start(), 0.0
    found = serialization.msgpack_restore(content)
    for done in found["carry"]["done"].values():
        if bool(done["weights"]) != programs.keeps_weights:
            has = "with" if done["weights"] else "without"
            raise RunError(
                f"weights={programs.keeps_weights}: seeds were finished {has} them;"
                " must be as the run was begun"
            )
    like = rounds.outline(programs, found["carry"])
    carry = serialization.from_state_dict(like, found["carry"])
    return rounds.deal(programs, carry), found["seconds"]


def _advance(
    programs: Programs,
    carry: Carry,
    signals: progress.Signals,
    checkpoint_seconds: float,
    save: Callable[[Carry, float], None],
) -> Carry:
    """Trains to the end, with progress shown.

    Args:
      programs: compiled.
      carry: to go on from.
      signals: that stop it at the next evaluation.
      checkpoint_seconds: between checkpoints.
      save: keeps a carry, given the seconds since this began.
    """
    experiment = programs.experiment
    done = rounds.steps_done(experiment, carry)
    began = saved = time.perf_counter()
    with progress.shown(
        experiment.name,
        rounds.cells(experiment) * experiment.steps,
        done,
        unit="seed-step",
        silent=not processes.leads(),
    ) as tell:
        while not rounds.is_done(experiment, carry):
            late = _since(saved) >= checkpoint_seconds
            stop, due = processes.any_of(bool(signals), late)
            if stop or due:
                save(carry, _since(began))
                saved = time.perf_counter()
            if stop:
                raise StoppedError(_place(experiment, carry))
            carry = rounds.advance(programs, carry)
            tell(rounds.steps_done(experiment, carry), _progress(experiment, carry))
    rate = (rounds.steps_done(experiment, carry) - done) / _since(began)
    _say(f"{rate:,.0f} seed-steps a second")
    return carry


def keep(
    programs: Programs,
    record: dict[str, Any],
    workdir: Path,
    carry: Carry,
    seconds: float,
) -> None:
    """Keeps a run in the middle, by process 0 for all.

    Args:
      programs: compiled.
      record: all that the numbers of the run depend on.
      workdir: claimed.
      carry: of this process.
      seconds: that the run took so far.
    """
    whole = rounds.collect(programs, carry)
    steps = rounds.steps_done(programs.experiment, whole)

    def save() -> None:
        content = serialization.to_bytes({"carry": whole, "seconds": seconds})
        checkpoints.save(workdir, record, steps, content)

    processes.led(save)


def _write(
    experiment: Experiment,
    workdir: Path,
    record: dict[str, Any],
    found: Records,
    wall: dict[str, float],
    finish: Finish | None,
) -> Run:
    with directory.staged(workdir, instead_of=[weights.WEIGHTS]) as stage:
        run = write.write_metrics(stage, record, *labelled(experiment, found))
        run = run.assign_attrs(path=str(workdir), wall_seconds=wall)
        if found.weights:
            weights.write_weights(stage, found.weights)
        if finish is not None:
            finish(stage, run)
    checkpoints.remove(workdir)
    return run


def labelled(
    experiment: Experiment, found: Records
) -> tuple[dict[str, Any], dict[str, list[str]], dict[str, Any]]:
    """Names what was recorded, as in metrics.npz and metrics.json.

    Args:
      experiment: that was run.
      found: of all its seeds.

    Returns:
      Arrays, the names of their axes, and coordinates.
    """
    grid, further = experiment.grid, experiment.axes
    steps = experiment.evaluation_steps()
    of_seed = ["arm", "seed"] if grid is None else ["arm", "point", "seed"]
    arrays = {"step": steps, **found.curves, "diverged_step": found.diverged_step}
    arrays |= found.traits
    axes = {"step": ["eval"], "diverged_step": of_seed}
    axes |= {n: [*of_seed, *further.get(n, ())] for n in found.traits}
    axes |= {n: [*of_seed, "eval", *further.get(n, ())] for n in found.curves}
    coordinates: dict[str, Any] = {
        "arm": [arm.name for arm in experiment.arms],
        "seed": found.seeds.tolist(),
        "eval": steps.tolist(),
    }
    snapshots = experiment.snapshots
    if snapshots is not None:
        constants = snapshots.constants()
        arrays |= found.snapshots | dict(constants)
        leading = ["arm", "snapshot_seed", "snapshot_step"]
        axes |= {n: [*leading, *snapshots.axes[n]] for n in found.snapshots}
        axes |= {n: list(snapshots.axes[n]) for n in constants}
        chosen = found.seeds[is_snapshot_seed(experiment, found.seeds)]
        coordinates["snapshot_seed"] = chosen.tolist()
        coordinates["snapshot_step"] = steps[experiment.snapshot_indices()].tolist()
    if grid is not None:
        names = list(grid.points)
        rows = zip(*(grid.points[name].tolist() for name in names), strict=True)
        coordinates["point"] = [dict(zip(names, row, strict=True)) for row in rows]
    return arrays, axes, coordinates


# --- what a person reads


def _headline(experiment: Experiment) -> str:
    arms = ", ".join(arm.name for arm in experiment.arms)
    points = "".join(f" x {count} points" for count in experiment.over_points)
    return (
        f"{experiment.name}: {arms}; {experiment.seeds} seeds{points},"
        f" {experiment.steps} steps\ncompiling ..."
    )


def _seeds_at_once(programs: Programs, room: Room) -> str:
    own, number = programs.plan, jax.process_count()
    kind = own.devices[0].device_kind
    if own.devices[0].platform == "cpu":
        units, on_each, where = f"{kind}, {own.workers} workers", own.slots, ""
    else:
        units, on_each = f"{len(own.devices)} x {kind}", own.together * own.workers
        where = " of each"
    units += f", {number} processes" if number > 1 else ""
    need, of = f"{room.seed_bytes * on_each / 2**30:.2g} GiB", ""
    if room.device_bytes is not None:
        of = f" of {room.device_bytes / 2**30:.3g}"
    return f"{units}: {own.slots * number} seeds at once, which need {need}{of}{where}"


def _place(experiment: Experiment, carry: Carry) -> str:
    begun = [f"seed {int(r.records.seeds[0])} on, step {r.step}" for r in carry.rounds]
    done = sum(len(part.seeds) for part in carry.done)
    return "; ".join([f"{done} of {experiment.seeds} seeds done", *begun[:1]])


def _progress(experiment: Experiment, carry: Carry) -> str:
    step = int(carry.rounds[0].step) if carry.rounds else experiment.steps
    seeds = f"seeds {int(carry.started)}/{experiment.seeds}"
    return f"step {step}/{experiment.steps}, {seeds}"


def _since(moment: float) -> float:
    return time.perf_counter() - moment


def _say(text: str) -> None:
    if processes.leads():
        print(text, flush=True)
