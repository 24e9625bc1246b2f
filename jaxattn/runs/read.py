"""A run, read from its directory as labelled arrays."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from jaxattn.runs.json_files import RunError, cause, not_of_a_run, read_json
from jaxattn.runs.shapes import SHAPES, contradiction, misfit_of_view

Run = xarray.Dataset

# Axis in metrics.json -> dimension; no variable may have the name of its own dimension.
_DIMENSIONS = {"eval": "step", "query": "query_position", "source": "source_position"}

# Part of a metric's name -> its unit; the first that fits.
_UNITS = (
    ("_bits", "bits"),
    ("diverged_step", "steps"),
    ("accuracy", "share"),
    ("_share", "share"),
    ("parameters", "count"),
    ("relative_entropy", "share"),
    ("attention_entropy", "nats"),
    ("_loss", "nats"),
    ("_nll", "nats"),
    ("_kl", "nats"),
    ("predictive_entropy", "nats"),
    ("gradient", "nats per unit"),
    ("routing_pressure", "nats per unit"),
    ("advantage", "nats per unit"),
    ("upstream", "nats per unit"),
)


def load(path: Path | str) -> Run:
    """Reads a run directory, without pickle.

    Args:
      path: of the directory.

    Returns:
      Dataset of every metric, with dimensions arm, seed, step (of evaluations), ... and
      `units` of each variable. Its attributes are `path`, `record` (all of
      config.json), `config`, `facts` and `summary` (None until it is written).

    Raises:
      RunError: it is not one, or its files are damaged or of different runs.
    """
    path = Path(path)
    try:
        with (
            (path / "metrics.npz").open("rb") as content,  # NumPy leaves it open
            np.load(content, allow_pickle=False) as file,
        ):
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except Exception as error:  # whatever zipfile, zlib and NumPy make of any bytes
        raise RunError(
            f"run={str(path)!r}: not a run directory ({cause(error)}); must have"
            " config.json, metrics.json and metrics.npz"
        ) from None
    record, metrics = (
        read_json(path / name, SHAPES[name], "run")
        for name in ("config.json", "metrics.json")
    )
    view = record["facts"]["view"]
    for name, wrong in (
        ("config.json", misfit_of_view("config.json", record, view)),
        ("config.json", contradiction(record)),
        ("metrics.json", misfit_of_view("metrics.json", metrics, view)),
    ):
        if wrong:
            raise not_of_a_run(path / name, wrong, "run")
    wrong = _unlike(record, metrics, arrays)
    if wrong:
        raise _of_different_runs(path, wrong)
    summary_path, summary = path / "summary.json", None
    if os.path.lexists(summary_path):
        summary = read_json(summary_path, SHAPES["summary.json"], "run")
    try:
        run = _labelled(arrays, metrics, record)
    except ValueError as error:  # names that xarray cannot bring together
        raise _of_different_runs(path, cause(error)) from None
    return run.assign_attrs(path=str(path), summary=summary)


def _of_different_runs(path: Path, wrong: str) -> RunError:
    return RunError(
        f"run={str(path)!r}: its files are of different runs ({wrong}); run the"
        " command that made it again"
    )


def load_finished(path: Path | str) -> Run:
    """Reads a run directory with its summary, see `load`.

    Raises:
      RunError: it is not one, or the run is not finished.
    """
    run = load(path)
    if run.attrs["summary"] is None:
        raise RunError(
            f"run={run.attrs['path']!r}: not finished, it has no summary.json; run the"
            " command that made it again"
        )
    return run


def _labelled(
    arrays: dict[str, np.ndarray], metrics: dict[str, Any], record: dict[str, Any]
) -> Run:
    axes, named = metrics["axes"], metrics["coordinates"]
    coordinates: dict[str, Any] = {}
    for axis, values in named.items():
        dimension = _DIMENSIONS.get(axis, axis)
        if values and isinstance(values[0], dict):  # points of a grid
            for name in values[0]:
                coordinates[name] = dimension, [point[name] for point in values]
        else:
            coordinates[dimension] = dimension, np.asarray(values)
    units = {
        f"{name}{end}": fields["unit"]
        for name, fields in record["facts"]["measures"].items()
        for end in ("", "_null")
    }
    variables = {}
    for name, array in arrays.items():
        dimensions = [_DIMENSIONS.get(axis, axis) for axis in axes[name]]
        if dimensions != [name]:  # else it is a coordinate
            unit = {"units": units.get(name) or _unit(name)}
            variables[name] = xarray.Variable(dimensions, array, unit)
    attributes = {"record": record, "config": record["config"]}
    return xarray.Dataset(
        variables, coordinates, attributes | {"facts": record["facts"]}
    )


def _unit(name: str) -> str:
    return next((unit for part, unit in _UNITS if part in name), "1")


def _unlike(record: dict, metrics: dict, arrays: dict[str, np.ndarray]) -> str:
    """In what the files of a run do not fit together; empty if they do."""
    named, coordinates = metrics["axes"], metrics["coordinates"]
    odd = sorted(named.keys() ^ arrays.keys())
    for name in named.keys() & arrays.keys():
        sizes = dict(zip(named[name], arrays[name].shape, strict=False))
        known = {a: len(coordinates.get(a, range(n))) for a, n in sizes.items()}
        if not arrays[name].ndim == len(named[name]) == len(sizes) or known != sizes:
            odd.append(name)
    if not np.array_equal(arrays.get("step", ()), coordinates["eval"]):
        odd.append("step")
    if odd:
        return f"metrics.npz and metrics.json differ in {', '.join(odd[:3])}"
    config, facts = record["config"], record["facts"]
    for name, held, found in (
        ("run_arms", config["run_arms"], coordinates["arm"]),
        ("seeds", config["seeds"], len(coordinates["seed"])),
        ("steps", [config["steps"]], coordinates["eval"][-1:]),
    ):
        if found != held:
            return f"config.json and metrics.json differ in {name}"
    asked = {facts["task"]["learned"], *facts["measures"]}
    asked |= {f"{n}_null" for n, fields in facts["measures"].items() if fields["null"]}
    missing = sorted(asked - arrays.keys())
    return f"metrics.npz has no {missing[0]}" if missing else ""
