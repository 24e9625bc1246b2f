"""The run directory: claimed before a run, checkpointed in it, written at once.

A directory is either untouched, or holds `checkpoints/` of a run in the middle, or a
whole finished run: its files are written beside it first and then moved in, with
summary.json last. What cannot be moved in leaves the run that was there as it was.
Files that are not named here, or in summary.json as figures, are the user's: they are
never removed.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization
from ml_collections import ConfigDict

import jaxattn
from jaxattn.engine import sweep
from jaxattn.experiments import config as config_lib
from jaxattn.models import transformer

_CHECKPOINT = re.compile(r"\d+\.msgpack")  # a digest and flax's bytes; the steps done
_DIGEST = hashlib.sha256
WEIGHTS = "weights.msgpack"
# What is written, and where more of it is.
_FILES = (
    *("config.json", "metrics.json", "metrics.npz", "summary.json", "summary.csv"),
    *("report.md", "report.html", "report.txt", WEIGHTS, "checkpoints/config.json"),
)
_FOLDERS = ("figures", "checkpoints")
_PICTURES = re.compile(r"[\w.-]+\.(png|gif|pdf)")
# What a killed run leaves: as `tempfile.mkdtemp` and `_replace` name it.
_WRITING = re.compile(r"\.writing-[a-z0-9_]{8}")
_NEW = re.compile(r"\.(\d+\.msgpack|config\.json)\.new")
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

_NUMBER = (int, float)
_ESTIMATE = {"mean": (*_NUMBER, type(None)), "ci95": (list, type(None))}
# What every reader of a file counts on, see `_misfit`; each kind of run has more.
_SHAPES = {
    "config.json": {
        "config": {
            **{"name": (str,), "steps": (int,), "seeds": (int,), "run_arms": [(str,)]},
            **{"arms": {...: {}}, "task": {"name": (str,)}},
        },
        **{"versions": {...: (str,)}, "device": {}},
    },
    "metrics.json": {
        "axes": {...: [(str,)]},
        "coordinates": {
            **{"arm": [(str,)], "seed": [(int,)], "eval": [(int,)]},
            **{...: (list,)},
        },
    },
    "summary.json": {
        **{"config": (str,), "steps": (int,), "seeds": (int,)},
        "wall_seconds": {"compile": _NUMBER, "run": _NUMBER},
        "arms": {
            ...: dict.fromkeys(
                ("train_loss", "heldout_loss", "heldout_kl", "accuracy"), _ESTIMATE
            )
        },
    },
}


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
def claimed(workdir: Path, config: ConfigDict | None) -> Iterator[None]:
    """Holds a directory for a run of this config; made if it is not there.

    Args:
      workdir: the directory.
      config: of the run; None for the one that lies in it.

    Raises:
      RunError: it cannot be written, another run is at work in it, it holds a run of
        another config, or something else where files of a run go.
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
        with _writing(workdir):
            _require_places(workdir)
            for left_over in _matching(workdir, _WRITING):
                if left_over.is_dir() and not left_over.is_symlink():
                    _put_back(workdir, left_over)
            if config is not None:
                _require_same(workdir, config)
                drawn(workdir)  # or it says what is wrong
            for left_over in _matching(workdir / "checkpoints", _NEW):
                left_over.unlink()
        yield
    finally:
        os.close(handle)
        _remove_empty(made)


def _require_places(workdir: Path) -> None:
    """Raises RunError where something is in the way of what a run will write."""
    names = [*_FILES]
    for folder in _FOLDERS:
        path = workdir / folder
        if os.path.lexists(path) and not path.is_dir():
            raise _in_the_way(workdir, folder, "a folder, or nothing")
        if path.is_dir():
            with tempfile.TemporaryFile(dir=path):  # or the error says why not
                pass
    for folder, pattern in (("figures", _PICTURES), ("checkpoints", _CHECKPOINT)):
        found = _matching(workdir / folder, pattern)
        names += [f"{folder}/{path.name}" for path in found]
    for name in names:
        if (workdir / name).is_dir():
            raise _in_the_way(workdir, name, "a file, or nothing")


def _in_the_way(workdir: Path, name: str, allowed: str) -> RunError:
    return RunError(
        f"workdir={str(workdir)!r}: {workdir / name} is in the way; allowed: {allowed};"
        " move it, or give another --workdir"
    )


def _matching(folder: Path, pattern: re.Pattern) -> list[Path]:
    """What is in a folder, if there is one, and has a name of this pattern."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if pattern.fullmatch(path.name))


def _checkpoints(workdir: Path) -> list[Path]:
    """The oldest first."""
    found = _matching(workdir / "checkpoints", _CHECKPOINT)
    return sorted(found, key=lambda path: int(path.stem))


def _require_same(workdir: Path, config: ConfigDict) -> None:
    """Raises RunError where a directory holds a run that this one would not go on."""
    finished = workdir / "config.json"
    if finished.is_file():
        held = _read_json(finished, {"config": {}})["config"]
        differing = _differing(held, _plain(config))
        if differing:
            raise RunError(
                f"workdir={str(workdir)!r}: holds a finished run of another config"
                f" (differs in {', '.join(differing)}); allowed: another --workdir, or"
                " to remove this one first"
            )
    unfinished = workdir / "checkpoints" / "config.json"
    if unfinished.is_file():
        differing = _differing(_read_json(unfinished, {}), describe(config))
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
        before = _checkpoints(workdir)
        content = serialization.to_bytes({"carry": carry, "seconds": seconds})
        path = folder / f"{steps}.msgpack"
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
    found = _checkpoints(workdir)
    if not found:
        return b""
    path = found[-1]
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
    folder = workdir / "checkpoints"
    left_over = [folder / "config.json", *_matching(folder, _NEW)]
    for path in (*_checkpoints(workdir), *left_over):
        with contextlib.suppress(OSError):  # the run is whole without
            path.unlink()
    _remove_empty([folder])


@contextlib.contextmanager
def staged(workdir: Path, *, instead_of: Iterable[str] = ()) -> Iterator[Path]:
    """A folder to write a finished run into; moved into `workdir` if all went well.

    Args:
      workdir: claimed.
      instead_of: names of files in it, of an earlier run or drawing, that go if they
        are not written anew.

    Yields:
      An empty folder. Its files replace their namesakes, one after another; meanwhile
      there is no summary.json, which says that the run is whole, and comes last.

    Raises:
      RunError: it cannot be written or moved in; what was there is as it was. After a
        kill in the middle, `claimed` puts it back.
    """
    with _writing(workdir):
        folder = Path(tempfile.mkdtemp(prefix=".writing-", dir=workdir))
        stage = folder / "new"
        try:
            stage.mkdir()
            yield stage
            _move_in(workdir, folder, instead_of)
        finally:
            _put_back(workdir, folder)


def _move_in(workdir: Path, folder: Path, instead_of: Iterable[str]) -> None:
    """Moves in what is in new/; what that replaces lies in old/ until all is in.

    Args:
      workdir: to move into.
      folder: of `staged`, in it. Its names.json says what is moved in.
      instead_of: see `staged`.
    """
    new, old = folder / "new", folder / "old"
    names = sorted(_files(new), key=lambda name: (name == "summary.json", name))
    going = dict.fromkeys(["summary.json", *names, *instead_of])
    going = [n for n in going if os.path.lexists(workdir / n)]
    for name in going:
        if (workdir / name).is_dir():
            raise _in_the_way(workdir, name, "a file, or nothing")
    _replace(folder / "names.json", _as_json(names).encode())
    old.mkdir()
    for path in (*(old / n for n in going), *(workdir / n for n in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
    for name in going:
        os.replace(workdir / name, old / name)
    for name in names:
        os.replace(new / name, workdir / name)
    os.replace(old, folder / "replaced")  # from here there is nothing to put back


def _put_back(workdir: Path, folder: Path) -> None:
    """Undoes a `_move_in` that did not come to its end, and removes its folder.

    Each file is moved back, so that this may itself be broken off and done again.
    """
    new, old = folder / "new", folder / "old"
    if old.is_dir():
        for name in _read_json(folder / "names.json", [(str,)]):
            if not (new / name).exists() and (workdir / name).exists():
                os.replace(workdir / name, new / name)
        for name in sorted(_files(old), key=lambda name: name == "summary.json"):
            os.replace(old / name, workdir / name)
        os.replace(old, folder / "replaced")
    # Whoever was left behind may still write here: the next claim removes what stays.
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    """Names of all files in it, however deep."""
    found = folder.rglob("*")
    return [str(p.relative_to(folder)) for p in found if p.is_symlink() or p.is_file()]


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
        (folder / WEIGHTS).write_bytes(content)


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
        found = serialization.msgpack_restore((path / WEIGHTS).read_bytes())[arm]
        own = jax.tree.map(lambda leaf: leaf[place], found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"run={str(path)!r}: its {WEIGHTS} cannot be read ({error!r}); allowed: a"
            " run that was trained with --weights"
        ) from None
    with explained(run):
        config = ConfigDict(run.config["config"])
        structure = config_lib.structure(config.arms[arm])
        architecture = config_lib.architecture(config, structure)
    try:
        return transformer.restored(architecture, own)
    except transformer.ParamsError as error:
        raise RunError(f"run={str(path)!r}, arm={arm!r}: {error}") from None


def drawn(workdir: Path) -> list[str] | None:
    """The figures that summary.json lists as drawn; what else is there is the user's.

    None for a run of before they were listed.

    Args:
      workdir: claimed.

    Raises:
      RunError: the list is damaged.
    """
    path = workdir / "summary.json"
    if not os.path.lexists(path):
        return []
    names = _read_json(path, {}).get("figures")
    wrong = names is not None and _misfit(names, [(str,)], "figures")
    if not wrong and names and not all(map(_PICTURES.fullmatch, names)):
        wrong = "figures has other names than of pictures"
    if wrong:
        raise RunError(
            f"workdir={str(workdir)!r}: its summary.json is not of a run ({wrong});"
            " allowed: to remove the list from it"
        )
    return names


def require_ours(workdir: Path, stage: Path, ours: list[str] | None) -> list[str]:
    """The figures in a stage, none of which may take the place of a user's file.

    Args:
      workdir: claimed.
      stage: from `staged`.
      ours: from `drawn`.

    Raises:
      RunError: one would.
    """
    new = [path.name for path in _matching(stage / "figures", _PICTURES)]
    for name in new:
        path = workdir / "figures" / name
        if ours is not None and name not in ours and os.path.lexists(path):
            raise RunError(
                f"workdir={str(workdir)!r}: {path} is not one that was drawn here, and"
                " is not replaced; allowed: to move it, and draw with"
                " scripts/figures.py"
            )
    return new


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
      RunError: it is not one, or its files are damaged or of different runs.
    """
    path = Path(path)
    try:
        with (
            (path / "metrics.npz").open("rb") as content,  # NumPy leaves it open
            np.load(content, allow_pickle=False) as file,
        ):
            metrics = {name: np.asarray(file[name]) for name in file.files}
    except Exception as error:  # whatever zipfile, zlib and NumPy make of any bytes
        raise RunError(
            f"run={str(path)!r}: not a run directory ({_cause(error)}); allowed: one"
            " with config.json, metrics.json and metrics.npz"
        ) from None
    config, axes = (
        _read_json(path / name, _SHAPES[name], "run")
        for name in ("config.json", "metrics.json")
    )
    wrong = _unlike(config["config"], axes, metrics)
    if wrong:
        raise RunError(
            f"run={str(path)!r}: its files are of different runs ({wrong}); allowed: to"
            " run the command that made it again"
        )
    summary_path, summary = path / "summary.json", None
    if os.path.lexists(summary_path):
        summary = _read_json(summary_path, _SHAPES["summary.json"], "run")
    return Run(path, config, axes, metrics, summary)


def _cause(error: Exception) -> str:
    """In one line."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


def _unlike(config: dict, axes: dict, metrics: dict[str, np.ndarray]) -> str:
    """In what the files of a run do not fit together; empty if they do."""
    named, coordinates = axes["axes"], axes["coordinates"]
    odd = sorted(named.keys() ^ metrics.keys())
    for name in named.keys() & metrics.keys():
        sizes = dict(zip(named[name], metrics[name].shape, strict=False))
        known = {a: len(coordinates.get(a, range(n))) for a, n in sizes.items()}
        if metrics[name].ndim != len(named[name]) or known != sizes:
            odd.append(name)
    if odd:
        return f"metrics.npz and metrics.json differ in {', '.join(odd[:3])}"
    of_config = config["run_arms"], config["seeds"], config["steps"]
    of_metrics = coordinates["arm"], len(coordinates["seed"]), coordinates["eval"][-1:]
    for name, held, found in zip(
        ("run_arms", "seeds", "steps"), of_config, of_metrics, strict=True
    ):
        if found != ([held] if name == "steps" else held):
            return f"config.json and metrics.json differ in {name}"
    return ""


@contextlib.contextmanager
def explained(run: Run) -> Iterator[None]:
    """Blames the config of a run for what fails, if it is not one that can run.

    Raises:
      RunError: so it is; names the field.
    """
    try:
        yield
    except Exception:
        try:
            config_lib.check(ConfigDict(_with_tuples(run.config["config"])))
        except (config_lib.ConfigError, ValueError, TypeError) as error:
            raise RunError(
                f"run={str(run.path)!r}: its config.json cannot be of a run"
                f" ({_cause(error)}); allowed: to put it right, or to run the command"
                " that made it again"
            ) from None
        raise


def _with_tuples(content: Any) -> Any:
    """As it was before JSON made lists of tuples."""
    if isinstance(content, dict):
        return {name: _with_tuples(inner) for name, inner in content.items()}
    return tuple(map(_with_tuples, content)) if isinstance(content, list) else content


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
        "versions": {
            "python": platform.python_version(),
            "jaxattn": jaxattn.__version__,
        }
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


def _read_json(path: Path, shape: Any, what: str = "workdir") -> Any:
    """What is in a file, if it is of this shape, see `_misfit`."""
    try:
        content = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
        wrong = _misfit(content, shape)
    except FileNotFoundError as error:
        wrong = f"not a run directory: {error.strerror}"
    except (ValueError, RecursionError, OSError) as error:
        wrong = _cause(error)
    if wrong:
        raise RunError(
            f"{what}={str(path.parent)!r}: its {path.name} is not of a run ({wrong});"
            f" allowed: another {what}, or to remove the file and run again"
        )
    return content


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _misfit(value: Any, shape: Any, name: str = "it") -> str:
    """What of a value has another shape; empty if nothing has.

    Args:
      value: read from JSON.
      shape: {"name": shape of it, ...: shape of all others}, [shape of each], or types.
      name: of the value, for the answer.
    """
    kind = type(shape) if isinstance(shape, dict | list) else None
    if type(value) not in ([kind] if kind else shape):
        return f"{name} is a {type(value).__name__}"
    inner: list[tuple[str, Any, Any]] = []
    if kind is list:
        inner = [(f"{name}[{n}]", v, shape[0]) for n, v in enumerate(value)]
    elif kind is dict:
        missing = [key for key in shape if key is not ... and key not in value]
        if missing:
            return f"{name} has no {missing[0]!r}"
        wanted = {key: shape.get(key, shape.get(...)) for key in value}
        inner = [(key, value[key], of) for key, of in wanted.items() if of is not None]
    found = (_misfit(v, of, key) for key, v, of in inner)
    return next(filter(None, found), "")


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
    folder = Path(jaxattn.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _git_commit() -> str:
    """The commit of the code, "+changes" behind it if edited; "unknown" outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(jaxattn.__file__).parent), *arguments],
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
