"""The numbers of a run of transformers: summary.json.

What `head` says of every run, and beside it what only exact Bayes and layers allow:
distances in bits, geometry beside its nulls, ablation, longer sequences.
"""

from typing import Any

import numpy as np

from jaxattn.analysis import entries, head, observations, stats
from jaxattn.analysis.findings import findings_of, judged_entry
from jaxattn.analysis.layer_curves import (
    GEOMETRY,
    attends,
    finite_alone,
    model_field,
    of_layers,
    settling,
)
from jaxattn.runs import Run

# In bits or shares, over scored positions of held-out sequences. KL and total variation
# are 0 for exact Bayes alone, entropy errors and calibration for others too.
DISTANCES = {
    "KL, bits": "heldout_kl_bits",
    "total variation": "heldout_total_variation",
    "entropy error": "heldout_entropy_error_bits",
    "averaged": "heldout_averaged_entropy_error_bits",
    "calibration": "calibration_error",
    "accuracy": "accuracy",
}


def summarise(run: Run, wall_seconds: dict[str, float]) -> dict[str, Any]:
    """What a program reads of a run of transformers, see `head.summarise`.

    Args:
      run: metrics and config.
      wall_seconds: "compile" and "run".
    """
    summary = head.summarise(run, wall_seconds)
    size, run = run["parameters"].values[:, 0], finite_alone(run)
    positions = entries.task_of(run)["scored"]
    summary["looked_at"]["positions"] = positions
    summary["longer_by"] = entries.task_of(run)["longer"]
    for row, (arm, entry) in enumerate(summary["arms"].items()):
        for name in DISTANCES.values():
            entry[name] = _entry(run[name].values[row, :, -1])
        entry["parameters"] = int(size[row])
        entry["differs_in"] = _differing(run.attrs["config"], arm)
        entry["positions"] = {
            name: _entries(run[name].values[row, :, -1])
            for name in run
            if name.startswith("position_") and run[name].values.ndim == 4
        }
        entry["longer"] = _longer(run, row)
        entry["log_kl_over_baseline"] = _over_baseline(run, summary, row)
        if attends(run, row):
            entry["geometry"] = _geometry(run, row)
            entry["ablation"] = _ablation(run, row)
            entry["time_scales"] = {
                name: observations.scales_entry(
                    observations.time_scales(settling(run), row, share),
                    run["step"].values,
                )
                for name, share in observations.SHARES.items()
            }
            entry["answers"] = [
                judged_entry(answer) for answer in findings_of(run, row)
            ]
    return summary


def _entry(values: np.ndarray) -> dict[str, Any]:
    return stats.estimate(values)._asdict()


def _entries(values: np.ndarray) -> list[dict[str, Any]]:
    """Of (seed, places), an estimate for each place."""
    return [_entry(column) for column in values.T]


def _longer(run: Run, row: int) -> dict[str, dict[str, Any]]:
    """KL in bits on sequences longer than trained, up to each of some lengths."""
    if "long_kl_bits" not in run:
        return {}
    kl = run["long_kl_bits"].values[row]
    most = run.attrs["config"]["eval_length_factor"]
    trained, longest = entries.task_of(run)["scored"], kl.shape[1]
    if longest == trained:  # longer by what is not asked for
        return {f"{most:g}": _entry(kl.mean(axis=1))}
    lengths = sorted({1.0, 1.5, 2.5, most})
    return {
        f"{factor:g}": _entry(kl[:, : round(factor * trained)].mean(axis=1))
        for factor in lengths
        if factor <= most
    }


def _over_baseline(run: Run, summary: dict, row: int) -> dict[str, Any]:
    """How many times the baseline's KL, as mean and interval of logarithms."""
    arms, baseline = list(summary["arms"]), summary["baseline"]
    if baseline not in arms:
        return _entry(np.array([]))
    kl = run["heldout_kl_bits"].values[..., -1].astype(np.float64)
    kl = np.where(kl > 0, kl, np.nan)
    return _entry(np.log(kl[row]) - np.log(kl[arms.index(baseline)]))


def _differing(config: dict[str, Any], arm: str) -> str:
    """The fields of an arm that are not those of the baseline, or not of its model."""
    mine, theirs = config["arms"][arm], config["arms"][config["baseline"]]
    theirs = config["model"] | {"value_norm": False, "dropout_rate": 0.0} | theirs
    said = {True: "on", False: "off"}
    return ", ".join(
        f"{name} {said[value] if isinstance(value, bool) else value}"
        for name, value in mine.items()
        if theirs.get(name) != value
    )


def _geometry(run: Run, row: int) -> dict[str, Any]:
    found = {}
    for name, nulls in GEOMETRY.items():
        values = of_layers(run, row, name)
        found[name] = {
            "start": _entries(values[:, 0]),
            "end": _entries(values[:, -1]),
        }
        for null in nulls:
            found[name][null] = _entries(of_layers(run, row, f"{name}_{null}")[:, -1])
    return found


def _ablation(run: Run, row: int) -> dict[str, Any]:
    found = {}
    for part in ("head", "heads", "mlp", "layer"):
        for how in ("zeroed", "averaged"):
            name = f"{part}_{how}_kl_bits"
            if name not in run:
                continue
            values = run[name].values[row][:, : model_field(run, row, "depth")]
            if np.isfinite(values).any():
                by_layer = np.moveaxis(values.reshape(*values.shape[:2], -1), 1, 0)
                found[f"{part}_{how}"] = [_entries(layer) for layer in by_layer]
    return found
