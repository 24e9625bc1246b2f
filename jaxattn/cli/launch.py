"""A run from its config to its directory: planned, resumed, trained, written.

With several processes each calls `train`; process 0 alone prints and writes.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxattn.analysis import runs
from jaxattn.engine import processes, progress, sweep
from jaxattn.engine.progress import StoppedError
from jaxattn.experiments import config as config_lib

# Calls what draws; may break it off, as `progress.Signals.left_behind` does.
DoneBy = Callable[[Callable[[], None]], None]


class Output(NamedTuple):
    """What is written of a finished run beside numbers and tables."""

    figures: bool  # all pictures, as PNG and GIF
    pdf: bool  # also as vector graphics
    html: bool  # also the report as one page
    weights: bool = False  # also what each arm ended with


class Way(NamedTuple):
    """How a run is done; nothing of it changes a number on a CPU."""

    workers: int  # batches of seeds at once
    together: int  # seeds of a batch on each device; 0: see `sweep.plan`
    memory_share: float  # of each device, that may be used
    checkpoint_seconds: float  # between checkpoints, at the next evaluation
    output: Output


class NotCompiledError(StoppedError):
    """The same while programs were compiled, which goes on in threads left behind."""


class NotDrawnError(StoppedError):
    """The same while pictures were drawn, by a thread left behind; all else is kept."""


def train(config: ConfigDict, workdir: Path, way: Way) -> dict[str, Any] | None:
    """Trains every arm on every seed, or goes on, and writes the run directory.

    Args:
      config: checked, see `config.check`.
      workdir: to write to; made if it is not there.
      way: how to do it.

    Returns:
      The content of summary.json, in process 0; None elsewhere.

    Raises:
      ConfigError: the config asks for more memory than there is, or for evidence that
        its task calls impossible.
      RunError: the directory cannot be used or written.
      ProcessError: the processes differ, or one is gone.
      StoppedError: a signal came.
    """
    if not way.checkpoint_seconds >= 0:  # also of NaN, after which none is due
        raise config_lib.ConfigError(
            f"checkpoint_seconds={way.checkpoint_seconds!r}: allowed: a number from 0;"
            " inf for none but that of a run that is stopped"
        )
    compiled_first = progress.signals_kept("when all is compiled")
    with compiled_first as signals, contextlib.ExitStack() as stack:
        described = json.dumps(runs.describe(config), sort_keys=True)
        processes.require_same("config, code and versions", described)
        held = runs.claimed(workdir, config)  # by process 0, for all
        processes.led(lambda: stack.enter_context(held))
        content = processes.led(lambda: runs.read_checkpoint(workdir))
        content = processes.hand_out(content or b"")
        on_cpu = jax.default_backend() == "cpu"
        plan = sweep.plan(
            config,
            jax.local_devices()[: 1 if on_cpu else None],
            together=way.together,
            workers=way.workers,
            memory_share=way.memory_share,
        )
        _say(_headline(config, plan))
        started = time.perf_counter()
        # Of several processes none may leave the others alone.
        alone = jax.process_count() == 1
        try:
            program = sweep.build(
                config,
                plan,
                keep_weights=way.output.weights,
                breakable=signals.at_once if alone else contextlib.nullcontext,
            )
        except StoppedError:
            raise NotCompiledError(str(workdir)) from None
        compiled = time.perf_counter()
        carry, before = runs.resumed(program, content)
        if content:
            _say(f"going on from {_place(config, carry)}")
        signals.until = "at the next evaluation"
        carry = _advance(program, carry, workdir, way, before, signals)
        signals.until = "when all numbers are written"
        wall = {"compile": compiled - started, "run": _since(compiled) + before}
        result = sweep.finish(program, carry)
        summary = processes.led(
            lambda: _write(
                config, workdir, result, wall, way.output, signals.left_behind
            )
        )
        return summary


def terminal(config: ConfigDict, summary: dict[str, Any]) -> str:
    """The tables of a run, for a terminal."""
    tables, _ = _readers(config)
    return tables.terminal(summary)


def _advance(
    program: sweep.Sweep,
    carry: sweep.Carry,
    workdir: Path,
    way: Way,
    before: float,
    signals: progress.Signals,
) -> sweep.Carry:
    """Trains to the end, with progress shown and checkpoints."""
    config = program.config
    done = sweep.steps_done(config, carry)
    began = saved = time.perf_counter()
    with progress.shown(
        config.name,
        sweep.cells(config) * config.steps,
        done,
        unit="seed-step",
        silent=not processes.leads(),
    ) as tell:
        while not sweep.is_done(config, carry):
            late = _since(saved) >= way.checkpoint_seconds
            stop, due = processes.any_of(bool(signals), late)
            if stop or due:
                _save(program, carry, workdir, _since(began) + before)
                saved = time.perf_counter()
            if stop:
                raise StoppedError(_place(config, carry))
            carry = sweep.advance(program, carry)
            tell(sweep.steps_done(config, carry), _progress(config, carry))
    rate = (sweep.steps_done(config, carry) - done) / _since(began)
    _say(f"{rate:,.0f} seed-steps a second")
    return carry


def _save(
    program: sweep.Sweep, carry: sweep.Carry, workdir: Path, seconds: float
) -> None:
    whole = sweep.collect(program, carry)
    processes.led(lambda: runs.save_checkpoint(workdir, program.config, whole, seconds))


def redraw(
    path: Path,
    output: Output,
    done_by: DoneBy = lambda draw: draw(),
) -> list[Path]:
    """Draws a finished run again, from its directory, and writes its tables anew.

    Args:
      path: of the run.
      output: what to write.
      done_by: draws.

    Returns:
      The files.

    Raises:
      RunError: it is no finished run, or cannot be written.
    """
    with runs.claimed(path, None):
        run = runs.load_finished(path)
        wall = run.summary["wall_seconds"]
        # A page that is there would else tell of older tables.
        output = output._replace(html=output.html or (path / "report.html").exists())
        with _drawing(path, output) as stage:
            with runs.explained(run):
                done_by(
                    lambda: _write_readable(path, stage, _summarised(run, wall), output)
                )
            found = [file for file in stage.rglob("*") if file.is_file()]
            written = {path / file.relative_to(stage) for file in found}
    return sorted(written)


def _write(
    config: ConfigDict,
    workdir: Path,
    result: sweep.Result,
    wall: dict[str, float],
    output: Output,
    done_by: DoneBy = lambda draw: draw(),
) -> dict[str, Any]:
    with runs.staged(workdir, instead_of=[runs.WEIGHTS]) as stage:
        run = _summarised(runs.write_metrics(stage, config, result), wall)
        runs.write_weights(stage, result)
        # First without pictures, so that numbers do not hang on drawing.
        none = Output(figures=False, pdf=False, html=False)
        _write_readable(workdir, stage, run, none)
    runs.remove_checkpoints(workdir)
    if output.figures or output.html:
        _say("drawing figures ...")
        try:
            with _drawing(workdir, output) as stage:
                done_by(lambda: _write_readable(workdir, stage, run, output))
        except StoppedError:
            raise NotDrawnError(str(workdir)) from None
    return run.summary


def _drawing(workdir: Path, output: Output) -> contextlib.AbstractContextManager[Path]:
    """A stage; figures that were drawn before, and are not in it, go if it moves in."""
    before = runs.drawn(workdir) if output.figures else None
    return runs.staged(workdir, instead_of=[f"figures/{n}" for n in before or ()])


def _summarised(run: runs.Run, wall: dict[str, float]) -> runs.Run:
    tables, _ = _readers(run.config["config"])
    return run._replace(summary=tables.summarise(run, wall))


def _write_readable(workdir: Path, stage: Path, run: runs.Run, output: Output) -> None:
    """Writes tables and pictures of a run with its summary into a stage."""
    tables, pictures = _readers(run.config["config"])
    shown, listed = {}, runs.drawn(workdir)
    if output.figures:
        drawn = pictures.draw(run, stage / "figures", pdf=output.pdf)
        shown = {f"figures/{name}": caption for name, caption in drawn.items()}
        listed = runs.require_ours(workdir, stage, listed)
    text = tables.markdown(run.summary, shown)
    (stage / "report.md").write_text(text, "utf-8")
    (stage / "summary.csv").write_text(tables.csv_table(run.summary), "utf-8")
    if output.html:
        from jaxattn.views import html

        (stage / "report.html").write_text(html.page(text, stage), "utf-8")
    summary = run.summary if listed is None else run.summary | {"figures": listed}
    runs.write_summary(stage, summary)


def _readers(config: Mapping[str, Any]):
    """What reads a run of this config, and what draws it."""
    # Late: with scipy and matplotlib they take a second, that training need not wait.
    from jaxattn.analysis import phase, report, tunnel_report
    from jaxattn.views import phase_figures, run_figures, tunnel_figures

    if "grid" in config:
        return phase, phase_figures
    if config_lib.is_tunnel(ConfigDict(config)):
        return tunnel_report, tunnel_figures
    return report, run_figures


def _headline(config: ConfigDict, plan: sweep.Plan) -> str:
    count = sweep.cells(config) // (config.seeds * len(config.run_arms))
    over = f" x {count} points" if count > 1 else ""
    kind, number = plan.devices[0].device_kind, jax.process_count()
    if plan.devices[0].platform == "cpu":
        units, on_each, where = f"{kind}, {plan.workers} workers", plan.slots, ""
    else:
        units, on_each = f"{len(plan.devices)} x {kind}", plan.together * plan.workers
        where = " of each"
    units += f", {number} processes" if number > 1 else ""
    need, of = f"{plan.seed_bytes * on_each / 2**30:.2g} GiB", ""
    if plan.device_bytes is not None:
        of = f" of {plan.device_bytes / 2**30:.3g}"
    return (
        f"{config.name}: {', '.join(config.run_arms)}; {config.seeds} seeds{over},"
        f" {config.steps} steps\n"
        f"{units}: {plan.slots * number} seeds at once, which need about"
        f" {need}{of}{where}\ncompiling ..."
    )


def _place(config: ConfigDict, carry: sweep.Carry) -> str:
    begun = [f"seed {int(r.kept.seeds[0])} on, step {r.step}" for r in carry.rounds]
    done = sum(len(kept.seeds) for kept in carry.done)
    return "; ".join([f"{done} of {config.seeds} seeds done", *begun[:1]])


def _progress(config: ConfigDict, carry: sweep.Carry) -> str:
    step = int(carry.rounds[0].step) if carry.rounds else config.steps
    return f"step {step}/{config.steps}, seeds {int(carry.started)}/{config.seeds}"


def _since(moment: float) -> float:
    return time.perf_counter() - moment


def _say(text: str) -> None:
    if processes.leads():
        print(text, flush=True)
