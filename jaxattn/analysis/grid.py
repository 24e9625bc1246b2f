"""The numbers of a run over a grid: each algorithm at its best rates, tuned on others.

The rates of an algorithm are chosen by the mean over seeds of what it ends at. Reported
on the same seeds that would flatter whoever has more points to choose from, so for each
seed the point is chosen on all the others; `stats.cross_fitted` is the interval.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxattn.analysis import claims, entries, stats
from jaxattn.analysis.entries import METRICS
from jaxattn.runs import Run

BASELINE = "sgd"


class Contender(NamedTuple):
    """An algorithm on one sequence, or on fresh ones, and its points of the grid."""

    name: str
    regime: str  # "one" sequence, or "fresh" ones
    row: int  # of the run's arms
    points: np.ndarray  # indices into the grid

    @property
    def title(self) -> str:
        """As it stands in tables and in summary.json."""
        return f"{self.name}/{self.regime}"


class Tuned(NamedTuple):
    """A contender with its rates chosen."""

    best: int  # the point that is best over all seeds, an index into the grid
    others: np.ndarray  # for each seed, the point that is best over the other seeds


class Points(NamedTuple):
    """The points of a grid: every regime x ratio x scale."""

    fresh: np.ndarray  # (P,) bool, whether every step draws new sequences
    ratio: np.ndarray  # (P,), how much faster the values move than the frame
    scale: np.ndarray  # (P,), times every learning rate


def points_of(run: Run) -> Points:
    """The points of the run."""
    ratio, scale = (run[n].values.astype(np.float32) for n in ("ratio", "scale"))
    return Points(run["fresh"].values, ratio, scale)


# Parts of a map of `two_timescale`, by the ratio of its rates.
_PARTS = {
    "sgd": lambda ratio: ratio == 1,
    "values_fast": lambda ratio: ratio > 1,  # EM-like
    "routing_fast": lambda ratio: ratio < 1,
}


def contenders(run: Run) -> list[Contender]:
    """Every contender of a run, with one sequence and with fresh ones.

    `two_timescale` of equal base rates is three: SGD where values and routing are
    equally fast, and those with faster values, as in EM, or faster routing.
    """
    config, points = run.attrs["config"], points_of(run)
    found = []
    for fresh, regime in ((False, "one"), (True, "fresh")):
        here = points.fresh == fresh
        for row, arm in enumerate(config["run_arms"]):
            fields = config["arms"][arm]
            parts = {arm: lambda ratio: ratio > 0}
            if not {"value_rate", "ridge"} & set(fields):  # all ratios are the same
                parts = {arm: lambda ratio: ratio == points.ratio[0]}
            if arm in run.attrs["facts"]["splits_by_ratio"]:
                parts = _PARTS
            for name, belongs in parts.items():
                mine = np.flatnonzero(here & belongs(points.ratio))
                found.append(Contender(name, regime, row, mine))
    return [contender for contender in found if len(contender.points) > 0]


def tuned(cost: np.ndarray, points: np.ndarray) -> Tuned:
    """Chooses the point of least mean cost.

    Args:
      cost: (P, n), of all points and seeds; a point of which any cost is not finite is
        taken only if all others are too.
      points: indices of those to choose from.

    Returns:
      Tuned, for n of at least 2.
    """
    mine = np.where(np.isfinite(cost[points]), cost[points], np.inf)
    others = [
        points[np.argmin(np.delete(mine, seed, axis=1).mean(axis=1))]
        for seed in range(mine.shape[1])
    ]
    return Tuned(int(points[np.argmin(mine.mean(axis=1))]), np.array(others))


def steps_to_threshold(run: Run) -> np.ndarray:
    """First evaluation with held-out KL to Bayes at or below the grid's threshold.

    Args:
      run: over a grid.

    Returns:
      Steps (arm, P, n), inf for a seed that did not get there or diverged.
    """
    config, curves = run.attrs["config"], run["heldout_kl"].values
    num_seeds, threshold = config["seeds"], config["grid"]["threshold"]
    rows = curves.reshape(-1, curves.shape[-1])
    first = stats.first_reached(
        run["step"].values, rows, np.full(len(rows), float(threshold))
    )
    first = first.reshape(*curves.shape[:2], num_seeds)
    return np.where(entries.stayed_finite(run), first, np.inf)


def tuned_times(run: Run) -> dict[str, np.ndarray]:
    """Steps to the threshold of each contender, at rates that were tuned on others.

    Args:
      run: over a grid.

    Returns:
      Title of the contender -> steps (n,), each seed at the point that was fastest over
      the others; inf if it never got there.
    """
    times = steps_to_threshold(run)
    seed = np.arange(run.attrs["config"]["seeds"])
    return {
        contender.title: times[
            contender.row, _by_time(run, times, contender).others, seed
        ]
        for contender in contenders(run)
    }


def _by_time(run: Run, times: np.ndarray, contender: Contender) -> Tuned:
    # Who never got there took longer than any who did.
    most = 2 * run.attrs["config"]["steps"]
    return tuned(np.minimum(times[contender.row], most), contender.points)


def summarise(run: Run, wall_seconds: dict[str, float]) -> dict[str, Any]:
    """What a program reads of a run over a grid.

    Args:
      run: metrics and config.
      wall_seconds: "compile" and "run".

    Returns:
      The content of summary.json: as of a run without a grid, with an arm for each
      contender and regime (one sequence, or fresh ones), at rates tuned on the
      other seeds.
    """
    config = run.attrs["config"]
    chance = math.log(entries.num_classes(run))
    ends = entries.final_metrics(run)
    seed = np.arange(config["seeds"])
    times = steps_to_threshold(run)

    arms, at_best, time_at_best = {}, {}, tuned_times(run)
    for contender in contenders(run):
        row = contender.row
        by_kl = tuned(ends["heldout_kl"][row], contender.points)
        by_time = _by_time(run, times, contender)
        chosen = {name: ends[name][row, by_kl.others, seed] for name in METRICS}
        at_best[contender.title] = chosen
        runs = ends["train_loss"][row, contender.points]
        best, fastest = (
            point_entry(points_of(run), contender, choice.best)
            for choice in (by_kl, by_time)
        )
        if not np.isfinite(times[row, by_time.best]).any():
            fastest = None  # nothing was, if nobody got there
        edges = [
            f"{text} point at the edge of the grid"
            for text, point in (("best", best), ("fastest", fastest))
            if point is not None and point["at_edge"]
        ]
        entry: dict[str, Any] = {
            name: stats.cross_fitted(values)._asdict()
            for name, values in chosen.items()
        }
        since = run["diverged_step"].values[row, by_kl.others, seed]
        since = since[since >= 0]
        arms[contender.title] = entry | {
            **entries.divergence_entry(since),
            "flags": _flags(run, contender, by_kl, chosen, since, chance) + edges,
            "best": best,
            "fastest": fastest,
            "steps_to_threshold": entries.times_entry(time_at_best[contender.title]),
            "grid_diverged": int(np.isnan(runs).sum()),
            "grid_runs": int(runs.size),
        }
    comparisons = _comparisons(run, at_best, time_at_best)
    return {
        "config": config["name"],
        "steps": config["steps"],
        "seeds": config["seeds"],
        "first_evaluation": int(run["step"].values[1]),
        "complete": True,
        "wall_seconds": wall_seconds,
        "trained_with": entries.trained_with(run),
        "floors": entries.floors(run, {name: v[0, 0] for name, v in ends.items()}),
        "grid": config["grid"],
        "arms": arms,
        "baseline": BASELINE,
        "comparisons": comparisons,
        "claims": _claims(comparisons),
    }


def point_entry(points: Points, contender: Contender, index: int) -> dict[str, Any]:
    """A point of a contender as it stands in summary.json."""

    def at_edge(axis: np.ndarray) -> bool:
        # An axis that the contender has one value of has no edge for it.
        varied = len(np.unique(axis[contender.points])) > 1
        return bool(varied and axis[index] in (axis.min(), axis.max()))

    return {
        "scale": float(f"{points.scale[index]:g}"),
        "ratio": float(f"{points.ratio[index]:g}"),
        "at_edge": at_edge(points.scale) or at_edge(points.ratio),
    }


def _flags(
    run: Run,
    contender: Contender,
    choice: Tuned,
    chosen: dict,
    since: np.ndarray,
    chance: float,
) -> list[str]:
    seed = np.arange(len(choice.others))
    gap = run["train_loss"].values - run["train_bayes_nll"].values
    gap = gap[contender.row, choice.others, seed]
    return entries.flags(
        diverged=since,
        below_bayes=int(
            entries.beats_bayes(gap, fresh=contender.regime == "fresh").sum()
        ),
        progress=entries.progress_to_bayes(chosen, chance),
        seeds=len(seed),
    )


def _comparisons(
    run: Run, at_best: dict[str, dict], times: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    found = []
    for contender in contenders(run):
        baseline = f"{BASELINE}/{contender.regime}"
        if contender.name == BASELINE or baseline not in at_best:
            continue
        ours, theirs = at_best[contender.title], at_best[baseline]
        time, base_time = times[contender.title], times[baseline]
        found.append(
            {
                "arm": contender.title,
                "baseline": baseline,
                "paired_difference": {
                    name: entries.difference_entry(
                        stats.cross_fitted_difference(ours[name], theirs[name])
                    )
                    for name in METRICS
                },
                "steps_to_threshold": entries.times_entry(time),
                "speedup": entries.speedup_entry(
                    stats.median_ratio(base_time, time, run["step"].values)
                ),
            }
        )
    return found


def _claims(comparisons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for entry in comparisons:
        name, _, regime = entry["arm"].rpartition("/")
        sequences = {"one": "one sequence", "fresh": "fresh sequences"}[regime]
        found.append(
            claims.claim_entry(
                claims.Claim(
                    f"{name} over SGD, {sequences}",
                    entry["arm"],
                    entry["baseline"],
                    "heldout_kl",
                ),
                stats.Difference(std=None, **entry["paired_difference"]["heldout_kl"]),
                {-1: "better", 1: "worse", 0: "undecided"},
            )
        )
    return found
