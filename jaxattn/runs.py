"""The run directory: claimed before a run, checkpointed in it, written at once.

A directory is either untouched, or holds `checkpoints/` of a run in the middle, or a
whole finished run: its files are written beside it first and then moved in, with
summary.json last.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization
from ml_collections import ConfigDict

import jaxattn
from jaxattn import config as config_lib
from jaxattn import sweep, transformer

_CHECKPOINT = "*.msgpack"  # a digest and flax's bytes; its name is the steps done
_DIGEST = hashlib.sha256
_WEIGHTS = "weights.msgpack"
# What a run may be resumed with though it was begun with others.
_ANY = ("device.count", "device.cores", "processes", "git_commit")
_SNAPSHOT_AXES = {
    "attention": ["query", "source"],
    "query": ["query", "d_k"],
    "key": ["source", "d_k"],
    "value": ["source", "d_v"],
    "upstream": ["query", "d_v"],
    "target": ["query"],
}
_PACKAGES = ("jax", "jaxlib", "optax", "flax", "chex", "numpy")


class RunError(RuntimeError):
    """A run directory that cannot be used. The message says what to do."""


class Run(NamedTuple):
    """A run as it lies in its directory."""

    path: Path
    config: dict[str, Any]  # what config.json holds
    axes: dict[str, Any]  # what metrics.json holds
    metrics: dict[str, np.ndarray]
    summary: dict[str, Any] | None  # None until it is written

    def select(self, name: str, **where: Any) -> np.ndarray:
        """A metric at named places, as in run.select("heldout_kl", arm="em", eval=20).

        Args:
          name: of a metric.
          where: axis -> its coordinate, or its place where the axis has no simple ones
            (points of a grid, positions); axes that are not named stay.

        Raises:
          RunError: no such metric, axis or coordinate.
        """
        axes = self._known("metric", name, self.axes["axes"])
        for axis in where:
            self._known("axis", axis, dict.fromkeys(axes))
        index: list[Any] = [slice(None)] * len(axes)
        for axis, coordinate in where.items():
            size = self.metrics[name].shape[axes.index(axis)]
            named = self.axes["coordinates"].get(axis, range(size))
            if isinstance(named[0], dict):
                named = range(size)
            places = {str(value): place for place, value in enumerate(named)}
            index[axes.index(axis)] = self._known(axis, str(coordinate), places)
        return self.metrics[name][tuple(index)]

    def _known(self, what: str, name: str, found: dict) -> Any:
        if name not in found:
            raise RunError(
                f"{what}={name!r}: not in run {str(self.path)!r}; allowed:"
                f" {', '.join(map(str, found))}"
            )
        return found[name]

    def to_frame(self):
        """Every metric of an arm, seed and evaluation as a long pandas table.

        Those that have positions, layers or heads behind are in `metrics` alone.

        Returns:
          DataFrame, a row for each arm, seed, evaluation (and point of a grid) and
          metric: columns arm, seed, step, (fresh, ratio, scale,) metric, value.

        Raises:
          RunError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise RunError(
                "to_frame: needs pandas, which is not installed; allowed: to install"
                " it, or to read `metrics`, whose axes are named in `axes`"
            ) from None
        curves = {n: names for n, names in self.axes["axes"].items() if "seed" in names}
        axes = next(names for names in curves.values() if names[-1] == "eval")
        curves = {n: names for n, names in curves.items() if names == axes}
        coordinates = self.axes["coordinates"]
        places = np.indices([len(coordinates[axis]) for axis in axes])
        columns = {}
        for axis, place in zip(axes, places.reshape(len(axes), -1), strict=True):
            if axis == "point":
                for name in coordinates[axis][0]:
                    of_points = np.array([point[name] for point in coordinates[axis]])
                    columns[name] = of_points[place]
            else:
                name = "step" if axis == "eval" else axis
                columns[name] = np.array(coordinates[axis])[place]
        wide = pandas.DataFrame(
            columns | {name: self.metrics[name].ravel() for name in curves}
        )
        return wide.melt(id_vars=list(columns), var_name="metric")


@contextlib.contextmanager
def claimed(workdir: Path, config: ConfigDict) -> Iterator[None]:
    """Holds a directory for a run of this config; made if it is not there.

    Raises:
      RunError: it cannot be written, another run is at work in it, or it holds a run of
        another config.
    """
    made = []
    try:
        made = [path for path in (workdir, *workdir.parents) if not path.exists()]
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
        handle = os.open(workdir, os.O_RDONLY)
    except OSError as error:
        _remove_empty(made)
        raise RunError(
            f"workdir={str(workdir)!r}: cannot be written ({error.strerror});"
            " allowed: a folder that can"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            reason = "another run is at work in it" if busy else error.strerror
            raise RunError(
                f"workdir={str(workdir)!r}: cannot be locked ({reason}); allowed:"
                " another --workdir, or to wait"
            ) from None
        _require_same(workdir, config)
        for left_over in workdir.glob(".writing-*"):
            shutil.rmtree(left_over)
        for left_over in workdir.glob("checkpoints/.*.new"):
            left_over.unlink()
        yield
    finally:
        os.close(handle)
        _remove_empty(made)


def _require_same(workdir: Path, config: ConfigDict) -> None:
    """Raises RunError where a directory holds a run that this one would not go on."""
    finished = workdir / "config.json"
    if finished.is_file():
        differing = _differing(_read_json(finished).get("config", {}), _plain(config))
        if differing:
            raise RunError(
                f"workdir={str(workdir)!r}: holds a finished run of another config"
                f" (differs in {', '.join(differing)}); allowed: another --workdir, or"
                " to remove this one first"
            )
    unfinished = workdir / "checkpoints" / "config.json"
    if unfinished.is_file():
        differing = _differing(_read_json(unfinished), describe(config))
        differing = [name for name in differing if name not in _ANY]
        if differing:
            raise RunError(
                f"workdir={str(workdir)!r}: holds an unfinished run of another config"
                f" or code (differs in {', '.join(differing)}); allowed: another"
                f" --workdir, or to remove {workdir / 'checkpoints'} first"
            )


def save_checkpoint(
    workdir: Path, config: ConfigDict, carry: sweep.Carry, seconds: float
) -> None:
    """Keeps a run in the middle, and the one kept before, but none before that.

    Args:
      workdir: claimed.
      config: of the run.
      carry: from `sweep.collect`.
      seconds: that it has taken so far.

    Raises:
      RunError: it cannot be written; the one kept before is still there.
    """
    folder = workdir / "checkpoints"
    steps = sweep.steps_done(config, carry)
    with _writing(workdir):
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            text = _as_json(describe(config))
            _replace(folder / "config.json", text.encode())
        before = sorted(folder.glob(_CHECKPOINT), key=_steps_of)
        content = serialization.to_bytes({"carry": carry, "seconds": seconds})
        path = folder / _CHECKPOINT.replace("*", str(steps))
        _replace(path, _DIGEST(content).digest() + content)
        for old in [old for old in before if old != path][:-1]:
            old.unlink()


def read_checkpoint(workdir: Path) -> bytes:
    """The newest checkpoint, for `resumed`; empty if there is none.

    Args:
      workdir: claimed.

    Raises:
      RunError: it is damaged, or cannot be read.
    """
    found = (workdir / "checkpoints").glob(_CHECKPOINT)
    path = max(found, key=_steps_of, default=None)
    if path is None:
        return b""
    try:
        content = path.read_bytes()
        size = _DIGEST().digest_size
        whole = _DIGEST(content[size:]).digest() == content[:size]
        reason = "its checksum is wrong"
    except OSError as error:
        whole, reason = False, error.strerror
    if not whole:
        raise RunError(
            f"workdir={str(workdir)!r}: its checkpoint is damaged ({reason}); allowed:"
            f" another --workdir, or to remove {path}, to go on from the one before it"
            " or else from the start"
        )
    return content[size:]


def resumed(program: sweep.Sweep, content: bytes) -> tuple[sweep.Carry, float]:
    """A run in the middle, and the seconds that it took.

    Args:
      program: of the same config.
      content: from `read_checkpoint`; empty for a run that has not begun.

    Raises:
      RunError: weights were kept, and are not to be, or the reverse.
    """
    if not content:
        return sweep.start(), 0.0
    found = serialization.msgpack_restore(content)
    for kept in found["carry"]["done"].values():
        if bool(kept["weights"]) != program.keeps_weights:
            has = "with" if kept["weights"] else "without"
            raise RunError(
                f"weights={program.keeps_weights}: seeds were finished {has} them;"
                " allowed: to go on as the run was begun"
            )
    like = sweep.outline(program, found["carry"])
    carry = serialization.from_state_dict(like, found["carry"])
    return sweep.deal(program, carry), found["seconds"]


def remove_checkpoints(workdir: Path) -> None:
    """Forgets a run in the middle, once it is finished."""
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)


@contextlib.contextmanager
def staged(workdir: Path) -> Iterator[Path]:
    """A folder to write a finished run into; moved into `workdir` if all went well.

    Yields:
      An empty folder. Each of its files replaces its namesake at once; summary.json,
      which says that the run is whole, comes last.

    Raises:
      RunError: it cannot be written; what was there is as it was.
    """
    with _writing(workdir), contextlib.ExitStack() as stack:
        stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=workdir))
        stack.callback(shutil.rmtree, stage)
        yield stage
        files = [path for path in stage.rglob("*") if path.is_file()]
        # From here until the new one is in place the directory is not whole.
        (workdir / "summary.json").unlink(missing_ok=True)
        for path in sorted(files, key=lambda path: path.name == "summary.json"):
            target = workdir / path.relative_to(stage)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)


def write_metrics(folder: Path, config: ConfigDict, result: sweep.Result) -> Run:
    """Writes config.json, metrics.npz and metrics.json.

    Args:
      folder: from `staged`.
      config: of the run.
      result: of the run.

    Returns:
      The run as it is read back, without a summary.
    """
    kept, points = result.kept, sweep.points(config)
    of_seed = ["arm", "seed"] if points is None else ["arm", "point", "seed"]
    arrays = {"step": result.step, **kept.curves, "diverged_step": kept.diverged_step}
    arrays |= kept.traits
    behind = sweep.axes_behind(config)
    axes = {"step": ["eval"], "diverged_step": of_seed}
    axes |= {name: [*of_seed, *behind.get(name, ())] for name in kept.traits}
    axes |= {name: [*of_seed, "eval", *behind.get(name, ())] for name in kept.curves}
    coordinates = {
        "arm": list(config.run_arms),
        "seed": kept.seeds.tolist(),
        "eval": result.step.tolist(),
    }
    if kept.snapshots:
        arrays |= kept.snapshots | {"attention_allowed": result.allowed}
        leading = ["arm", "snapshot_seed", "snapshot_step"]
        axes |= {name: [*leading, *_SNAPSHOT_AXES[name]] for name in kept.snapshots}
        axes["attention_allowed"] = _SNAPSHOT_AXES["attention"]
        snapshots = result.step[sweep.snapshot_indices(config)]
        coordinates["snapshot_seed"] = sorted(config.snapshot_seeds)
        coordinates["snapshot_step"] = snapshots.tolist()
    if points is not None:
        coordinates["point"] = [
            {"fresh": bool(fresh), "ratio": float(ratio), "scale": float(scale)}
            for fresh, ratio, scale in zip(*points, strict=True)
        ]
    np.savez_compressed(folder / "metrics.npz", **arrays)
    _write_json(folder / "metrics.json", {"axes": axes, "coordinates": coordinates})
    write_config(folder, config)
    return load(folder)


def write_weights(folder: Path, result: sweep.Result) -> None:
    """Writes weights.msgpack, what each arm ended with on each seed, if it was kept.

    Args:
      folder: from `staged`.
      result: of the run.
    """
    if result.kept.weights:
        content = serialization.to_bytes(result.kept.weights)
        (folder / _WEIGHTS).write_bytes(content)


def remove_weights(workdir: Path) -> None:
    """Forgets the weights of an earlier run of the same config."""
    (workdir / _WEIGHTS).unlink(missing_ok=True)


def load_weights(path: Path | str, arm: str, seed: int) -> transformer.Params:
    """Parameters of an arm at the end, for `transformer.apply`.

    Args:
      path: of a run directory with weights.msgpack.
      arm: that ran.
      seed: its id.

    Raises:
      RunError: it is not there, or not of this arm's architecture; names what is
        missing, too much, or of another shape.
    """
    run, path = load(path), Path(path)
    run.select("diverged_step", arm=arm, seed=seed)  # or it says what there is
    place = list(map(str, run.axes["coordinates"]["seed"])).index(str(seed))
    try:
        found = serialization.msgpack_restore((path / _WEIGHTS).read_bytes())[arm]
        own = jax.tree.map(lambda leaf: leaf[place], found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"run={str(path)!r}: its {_WEIGHTS} cannot be read ({error!r}); allowed: a"
            " run that was trained with --weights"
        ) from None
    config = ConfigDict(run.config["config"])
    structure = config_lib.structure(config.arms[arm])
    try:
        return transformer.restored(config_lib.architecture(config, structure), own)
    except transformer.ParamsError as error:
        raise RunError(f"run={str(path)!r}, arm={arm!r}: {error}") from None


def write_config(folder: Path, config: ConfigDict) -> None:
    """Writes config.json."""
    _write_json(folder / "config.json", describe(config))


def differing(held: Run, wanted: Run) -> list[str]:
    """Dotted names of the config fields in which two runs differ."""
    return _differing(held.config["config"], wanted.config["config"])


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json."""
    _write_json(folder / "summary.json", summary)


def load(path: Path | str) -> Run:
    """Reads a run directory, without pickle.

    Raises:
      RunError: it is not one.
    """
    path = Path(path)
    try:
        config = json.loads((path / "config.json").read_text())
        axes = json.loads((path / "metrics.json").read_text())
        with np.load(path / "metrics.npz", allow_pickle=False) as file:
            metrics = dict(file)
        summary_path = path / "summary.json"
        summary = (
            json.loads(summary_path.read_text()) if summary_path.exists() else None
        )
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RunError(
            f"run={str(path)!r}: not a run directory ({error}); allowed: one with"
            " config.json, metrics.json and metrics.npz"
        ) from None
    return Run(path, config, axes, metrics, summary)


def load_finished(path: Path | str) -> Run:
    """Reads a run directory with its summary.

    Raises:
      RunError: it is not one, or the run is not finished.
    """
    run = load(path)
    if run.summary is None:
        raise RunError(
            f"run={str(run.path)!r}: not finished, it has no summary.json; allowed:"
            " to run the command that made it again"
        )
    return run


def describe(config: ConfigDict) -> dict[str, Any]:
    """All that a run's numbers depend on: config, versions, device, code, generator."""
    devices = jax.devices()
    return {
        "config": _plain(config),
        "versions": {"jaxattn": jaxattn.__version__}
        | {name: metadata.version(name) for name in _PACKAGES},
        "device": {
            "kind": devices[0].device_kind,
            "count": len(devices),
            "cores": os.cpu_count(),
        },
        "processes": jax.process_count(),
        "code": _code(),
        "git_commit": _git_commit(),
        "prng_implementation": str(jax.config.jax_default_prng_impl),
    }


def _plain(config: ConfigDict) -> dict[str, Any]:
    """As JSON gives it back, so that the two can be compared."""
    return json.loads(json.dumps(config.to_dict()))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise RunError(
            f"workdir={str(path.parent)!r}: its {path.name} is not of a run; allowed:"
            " another --workdir, or to remove the file first"
        )
    return content


def _remove_empty(folders: list[Path]) -> None:
    """Removes the innermost first, as far as nothing lies in them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _differing(held: dict, wanted: dict, prefix: str = "") -> list[str]:
    names = []
    for key in sorted(held.keys() | wanted.keys()):
        old, new = held.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += _differing(old, new, f"{prefix}{key}.")
        elif old != new:
            names.append(f"{prefix}{key}")
    return names


def _steps_of(checkpoint: Path) -> int:
    return int(checkpoint.stem)


@contextlib.contextmanager
def _writing(workdir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"workdir={str(workdir)!r}: cannot be written ({error.strerror or error});"
            " allowed: to make room, and the same command goes on from what was there"
        ) from None


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole, or not at all."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _code() -> str:
    """A digest of this package's source."""
    digest = _DIGEST()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _git_commit() -> str:
    """The commit of the code, "+changes" behind it if edited; "unknown" outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".", ":/configs", ":/scripts")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _write_json(path: Path, content: Any) -> None:
    path.write_text(_as_json(content), encoding="utf-8")


def _as_json(content: Any) -> str:
    # allow_nan=False: a NaN is no JSON, and no number to hand to a program.
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
