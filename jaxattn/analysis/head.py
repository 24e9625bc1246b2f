"""The numbers of a run of one head: summary.json."""

import math
from typing import Any

from jaxattn.analysis import claims, measured, observations, stats
from jaxattn.analysis.entries import (
    beats_bayes,
    difference_entry,
    divergence_entry,
    final_metrics,
    flags,
    floors,
    metrics_of,
    num_classes,
    progress_to_bayes,
    speedup_entry,
    stayed_finite,
    task_of,
    times_entry,
    times_to_baseline,
    trained_with,
)
from jaxattn.runs import Run

# The curve that must come down to where the baseline's ended -> names in summary.json.
SPEEDUPS = {
    "train_loss": ("steps_to_baseline_final", "speedup"),
    "heldout_kl": ("heldout_steps_to_baseline_final", "heldout_speedup"),
}


def summarise(run: Run, wall_seconds: dict[str, float]) -> dict[str, Any]:
    """What a program reads of a run: final metrics by arm, floors, comparisons.

    Args:
      run: metrics and config.
      wall_seconds: "compile" and "run".

    Returns:
      The content of summary.json. Losses, entropies and distances in nats.
    """
    config = run.attrs["config"]
    arms = config["run_arms"]
    final = final_metrics(run)
    chance = math.log(num_classes(run))
    finite = stayed_finite(run)

    gap = run["train_loss"].values - run["train_bayes_nll"].values
    below_bayes = beats_bayes(gap, fresh=config["fresh"])
    progress = progress_to_bayes(final, chance)
    by_arm = {}
    for row, arm in enumerate(arms):
        kept = finite[row]
        entry: dict[str, Any] = {
            name: stats.estimate(values[row])._asdict()
            for name, values in final.items()
        }
        since = run["diverged_step"].values[row][~kept]
        entry |= divergence_entry(since)
        # Where all that can be learned is memory, memory is no warning.
        judged = kept & (task_of(run)["shown"] == "heldout")
        entry["flags"] = flags(
            diverged=since,
            below_bayes=int(below_bayes[row][judged].sum()),
            progress=progress[row][judged],
            seeds=len(kept),
        )
        entry["measures"] = measured.of_arm(run, row)
        by_arm[arm] = entry

    return {
        "config": config["name"],
        "steps": config["steps"],
        "seeds": config["seeds"],
        "first_evaluation": int(run["step"].values[1]),
        "complete": True,
        "wall_seconds": wall_seconds,
        "trained_with": trained_with(run),
        # The sequences are the same for every arm.
        "floors": floors(run, {n: v[0, :, -1] for n, v in metrics_of(run).items()}),
        "arms": by_arm,
        "baseline": config["baseline"],
        "comparisons": _comparisons(run, final),
        "claims": claims.judged(run),
        "looked_at": looked_at(run),
        "observations": observations.of_arms(run),
        "task_note": task_of(run)["note"],
    }


def looked_at(run: Run) -> dict[str, Any]:
    """On what diagnostics are: which sequence, and how many of its positions."""
    positions = run.attrs["facts"].get("diagnosed_positions", 0)
    sequence = {"heldout": "held-out", "train": "training"}[task_of(run)["shown"]]
    return {"sequence": sequence, "positions": positions}


def _comparisons(run: Run, final: dict) -> list[dict[str, Any]]:
    config = run.attrs["config"]
    arms, baseline = config["run_arms"], config["baseline"]
    base = arms.index(baseline)
    comparisons = []
    for row, arm in enumerate(arms):
        if row == base:
            continue
        entry = {
            "arm": arm,
            "baseline": baseline,
            "paired_difference": {
                name: difference_entry(
                    stats.paired_difference(values[row], values[base])
                )
                for name, values in final.items()
            },
        }
        for metric, names in SPEEDUPS.items():
            entry |= zip(names, _speedup(run, metric, row, base), strict=True)
        comparisons.append(entry)
    return comparisons


def _speedup(
    run: Run, metric: str, row: int, base: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps of an arm to where the baseline ended, and how many times fewer they are.

    Both are counted alike, see `times_to_baseline`, so that an arm is as fast as its
    copy.
    """
    times, base_times = (times_to_baseline(run, metric, r, base) for r in (row, base))
    speedup = stats.median_ratio(base_times, times, run["step"].values)
    return times_entry(times), speedup_entry(speedup)
