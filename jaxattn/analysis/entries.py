"""Entries of summary.json that all kinds of runs share: floors, flags, differences."""

import math
from typing import Any

import numpy as np

from jaxattn.analysis import stats
from jaxattn.runs import Run

# Metrics at the end, of each arm in summary.json and summary.csv, in this order.
METRICS = (
    "train_loss",
    "train_bayes_nll",
    "train_kl",
    "train_accuracy",
    "train_predictive_entropy",
    "train_attention_entropy",
    "heldout_loss",
    "heldout_bayes_nll",
    "heldout_kl",
    "accuracy",
    "predictive_entropy",
    "attention_entropy",
)


def trained_with(run: Run) -> str:
    """Versions and device, on which the last bits of a run depend."""
    versions = run.attrs["record"]["versions"]
    named = {"jaxattn": "jaxattn", "jax": "jax", "python": "Python"}
    parts = [f"{text} {versions[n]}" for n, text in named.items() if n in versions]
    return ", ".join(
        [*parts, f"on {run.attrs['record'].get('device', {}).get('kind', '?')}"]
    )


def stayed_finite(run: Run) -> np.ndarray:
    """Whether weights and metrics were always finite: (arm, seed), or as in a grid."""
    return run["diverged_step"].values < 0


def divergence_entry(since: np.ndarray) -> dict[str, int | None]:
    """How many seeds diverged, and when the first did.

    Args:
      since: the steps at which they did.
    """
    first = int(since.min()) if len(since) else None
    return {"diverged": len(since), "first_diverged_step": first}


def final_metrics(run: Run) -> dict[str, np.ndarray]:
    """Every metric at the end, NaN for a seed that diverged."""
    finite = stayed_finite(run)
    return {
        name: np.where(finite, values[..., -1], np.nan)
        for name, values in metrics_of(run).items()
    }


def metrics_of(run: Run) -> dict[str, np.ndarray]:
    """The curves that all kinds of runs have; of layers there is one less."""
    return {name: run[name].values for name in METRICS if name in run}


def floors(run: Run, final: dict[str, np.ndarray]) -> dict[str, Any]:
    """What no model can beat, and what it takes no learning to reach, in nats.

    Args:
      run: its config says which task.
      final: metric -> one value for each seed.
    """
    return {
        "entropy_rate": task_of(run)["entropy_rate"],
        "bayes_heldout_nll": interval_entry(stats.estimate(final["heldout_bayes_nll"])),
        "bayes_train_nll": interval_entry(stats.estimate(final["train_bayes_nll"])),
        "chance": math.log(num_classes(run)),
    }


def progress_to_bayes(final: dict[str, np.ndarray], chance: float) -> np.ndarray:
    """How far the held-out loss is from chance (0) to exact Bayes (1).

    Args:
      final: metric -> one value for each seed, of any leading shape.
      chance: loss of equal shares, nats.

    Returns:
      Below 0 if the loss is above chance. On a sequence so odd that Bayes itself is no
      better than chance, 1 for a loss that is not above chance.
    """
    come, whole = chance - final["heldout_loss"], chance - final["heldout_bayes_nll"]
    return np.where(
        whole > 0, come / np.where(whole > 0, whole, 1), np.sign(come) + (come == 0)
    )


def beats_bayes(gap: np.ndarray, *, fresh: bool) -> np.ndarray:
    """Whether each seed's train loss passes below the Bayes floor.

    Args:
      gap: train loss less that of exact Bayes on the same sequence (..., evaluation).
      fresh: if so the average over the evaluations counts, since on a sequence of its
        own a good model may be the luckier one; if not, any evaluation does.

    Returns:
      (...) boolean; by more than rounding.
    """
    least = -stats.ROUNDING  # of losses of about a nat
    return gap[..., 1:].mean(axis=-1) < least if fresh else (gap < least).any(axis=-1)


# Progress from chance to Bayes below which nothing was learned to speak of.
LEFT_CHANCE = 0.1


def flags(
    *, diverged: np.ndarray, below_bayes: int, progress: np.ndarray, seeds: int
) -> list[str]:
    """Warnings about one arm, each with the number of seeds it holds for.

    Args:
      diverged: steps at which seeds did.
      below_bayes: seeds for which `beats_bayes`.
      progress: `progress_to_bayes` of the others.
      seeds: all of them.
    """
    found = {
        "diverged": len(diverged),
        "train loss below the Bayes floor": below_bayes,
        "held-out loss above chance": int((progress < 0).sum()),
        "not left chance": int(((progress >= 0) & (progress < LEFT_CHANCE)).sum()),
    }
    lines = {t: f"{t} in {k} of {seeds} seeds" for t, k in found.items() if k > 0}
    if "diverged" in lines:
        lines["diverged"] += f", the first at step {diverged.min()}"
    return list(lines.values())


def moved(run: Run) -> np.ndarray:
    """Whether the parameters of each arm changed on any seed: (arm,) boolean.

    As its loss on sequences that are the same at every evaluation tells.
    """
    loss = run["heldout_loss"].values
    return (loss != loss[..., :1]).any(axis=(1, 2))


def times_entry(times: np.ndarray) -> dict[str, Any]:
    """Steps of each seed, inf if it never got there, as they stand in summary.json."""
    median = stats.median(times)
    reached = int(np.isfinite(times).sum())
    return {"median": median.median, "reached": reached, "n": median.n}


def speedup_entry(speedup: stats.Median) -> dict[str, Any]:
    """A speed-up as it stands in summary.json.

    `beyond` tells what None stands for at the low end, the median and the high end:
    of a median "<" below 1, since the arm came later than the run, ">" above 1, since
    the baseline did, "?" not known, "≥" at least so much; of an end "<" 0, ">" no
    bound. See `stats.Median`.
    """
    return {
        "median": speedup.median,
        "ci95": speedup.ci95,
        "beyond": speedup.beyond,
        "n": speedup.n,
    }


def interval_entry(estimate: stats.Estimate) -> dict[str, Any]:
    """An estimate as it stands in the floors of summary.json."""
    return {"mean": estimate.mean, "ci95": estimate.ci95, "n": estimate.n}


def difference_entry(difference: stats.Difference) -> dict[str, Any]:
    """A paired difference as it stands in summary.json."""
    entry = difference._asdict()
    del entry["std"]
    return entry


def task_of(run: Run) -> dict[str, Any]:
    """What there is to know of the run's task."""
    return run.attrs["facts"]["task"]


def num_classes(run: Run) -> int:
    """Number of classes of the run's task."""
    return task_of(run)["num_classes"]


def bayes_floors(run: Run) -> dict[str, float | None]:
    """What exact Bayes has of each metric, mean over seeds; None if it is not known."""
    found = {
        "train_loss": run.attrs["summary"]["floors"]["bayes_train_nll"]["mean"],
        "heldout_loss": run.attrs["summary"]["floors"]["bayes_heldout_nll"]["mean"],
    }
    for name in ("accuracy", "predictive_entropy"):
        known = f"bayes_{name}" in run
        values = run[f"bayes_{name}"].values[0] if known else None
        found[name] = stats.estimate(values).mean if known else None
    return found


def times_to_baseline(run: Run, metric: str, row: int, base: int) -> np.ndarray:
    """Steps of an arm to where the baseline ended, on each seed.

    To the first evaluation at or below the baseline's last value on that seed. A seed
    on which the baseline diverged, or ended no lower than it began, has no such place.

    Args:
      run: its metrics.
      metric: whose curve must come down.
      row: of the arm.
      base: row of the baseline.

    Returns:
      (seed,), inf if it never got there or diverged, NaN without a place.
    """
    finite, curves = stayed_finite(run), run[metric].values
    learned = finite[base] & stats.less(curves[base, :, -1], curves[base, :, 0])
    threshold = np.where(learned, curves[base, :, -1], np.nan)
    times = stats.first_reached(run["step"].values, curves[row], threshold)
    return np.where(finite[row] | np.isnan(times), times, np.inf)
