"""A run, read from its directory as labelled arrays."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from jaxattn.runs.json_files import NUMBER, RunError, cause, read_json

Run = xarray.Dataset

_ESTIMATE = {"mean": (*NUMBER, type(None)), "ci95": (list, type(None))}
# What every reader of a file counts on, see `misfit`; each kind of run has more.
_SHAPES = {
    "config.json": {
        "config": {
            **{"name": (str,), "steps": (int,), "seeds": (int,), "run_arms": [(str,)]},
            **{"arms": {...: {}}, "task": {"name": (str,)}},
        },
        "facts": {
            "view": (str,),
            "task": {
                **{"num_classes": (int,), "entropy_rate": (*NUMBER, type(None))},
                **{"learned": (str,), "shown": (str,), "lag": (int,), "note": (str,)},
                **{"causal": (bool,), "positions": (int,)},
            },
            "measures": {...: {"about": (str,), "unit": (str,), "null": (bool,)}},
            "claims": [dict.fromkeys(("text", "arm", "baseline", "metric"), (str,))],
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
        "wall_seconds": {"compile": NUMBER, "run": NUMBER},
        "arms": {
            ...: dict.fromkeys(
                ("train_loss", "heldout_loss", "heldout_kl", "accuracy"), _ESTIMATE
            )
        },
    },
}
# Axis in metrics.json -> dimension; no variable may have the name of its own dimension.
_DIMENSIONS = {"eval": "step", "query": "query_position", "source": "source_position"}

# Part of a metric's name -> its unit; the first that fits.
_UNITS = (
    ("_bits", "bits"),
    ("diverged_step", "steps"),
    ("accuracy", "share"),
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
        read_json(path / name, _SHAPES[name], "run")
        for name in ("config.json", "metrics.json")
    )
    wrong = _unlike(record["config"], metrics, arrays)
    if wrong:
        raise RunError(
            f"run={str(path)!r}: its files are of different runs ({wrong}); run the"
            " command that made it again"
        )
    summary_path, summary = path / "summary.json", None
    if os.path.lexists(summary_path):
        summary = read_json(summary_path, _SHAPES["summary.json"], "run")
    return _labelled(arrays, metrics, record).assign_attrs(
        path=str(path), summary=summary
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
    own = record["facts"]["measures"]
    variables = {}
    for name, array in arrays.items():
        dimensions = [_DIMENSIONS.get(axis, axis) for axis in axes[name]]
        if dimensions != [name]:  # else it is a coordinate
            unit = own[name]["unit"] if name in own else _unit(name)
            variables[name] = xarray.Variable(dimensions, array, {"units": unit})
    attributes = {"record": record, "config": record["config"]}
    return xarray.Dataset(
        variables, coordinates, attributes | {"facts": record["facts"]}
    )


def _unit(name: str) -> str:
    return next((unit for part, unit in _UNITS if part in name), "1")


def _unlike(config: dict, metrics: dict, arrays: dict[str, np.ndarray]) -> str:
    """In what the files of a run do not fit together; empty if they do."""
    named, coordinates = metrics["axes"], metrics["coordinates"]
    odd = sorted(named.keys() ^ arrays.keys())
    for name in named.keys() & arrays.keys():
        sizes = dict(zip(named[name], arrays[name].shape, strict=False))
        known = {a: len(coordinates.get(a, range(n))) for a, n in sizes.items()}
        if arrays[name].ndim != len(named[name]) or known != sizes:
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
