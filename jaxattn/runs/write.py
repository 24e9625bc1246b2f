"""Files of a run, written into a stage."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxattn.runs.json_files import write_json
from jaxattn.runs.read import Run, load


def plain(content: Any) -> Any:
    """Returns content as JSON gives it back, so that the two can be compared."""
    return json.loads(json.dumps(content))


def write_metrics(
    folder: Path,
    record: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
    axes: Mapping[str, list[str]],
    coordinates: Mapping[str, Any],
) -> Run:
    """Writes config.json, metrics.npz and metrics.json.

    Args:
      folder: to write into.
      record: all that the numbers depend on: config, facts, versions, device, ...
      arrays: by name.
      axes: name -> the names of its axes.
      coordinates: axis -> its coordinates.

    Returns:
      The run as it is read back, without a summary.
    """
    np.savez_compressed(folder / "metrics.npz", **arrays)
    metrics = {"axes": dict(axes), "coordinates": dict(coordinates)}
    write_json(folder / "metrics.json", metrics)
    write_record(folder, record)
    return load(folder)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes config.json."""
    write_json(folder / "config.json", record)


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json."""
    write_json(folder / "summary.json", summary)
