"""Tables from a run over a grid of rates: each schedule at its best, tuned on others.

A schedule's rates are chosen by the mean over seeds of what it ends at. Reported on the
same seeds that would flatter whoever has more points to choose from, so for each seed
the point is chosen on all the others; `stats.cross_fitted` is the interval for that.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxattn.analysis import report, stats
from jaxattn.analysis.runs import Run
from jaxattn.engine import sweep
from jaxattn.experiments.config import GRID_SCHEDULES
from jaxattn.experiments.one_head import METRICS

_SGD, _VALUES_FAST, _ROUTING_FAST = GRID_SCHEDULES
BASELINE = _SGD


class Schedule(NamedTuple):
    """A schedule with sequences of one kind, and the points that are its own."""

    name: str
    regime: str  # "one" sequence, or "fresh" ones
    row: int  # of the run's arms
    points: np.ndarray  # indices into the grid

    @property
    def title(self) -> str:
        """As it stands in tables and in summary.json."""
        return f"{self.name}/{self.regime}"


class Tuned(NamedTuple):
    """A schedule with its rates chosen."""

    best: int  # the point that is best over all seeds, an index into the grid
    others: np.ndarray  # for each seed, the point that is best over the other seeds


def grid(run: Run) -> sweep.Points:
    """The points of the run."""
    return sweep.points(ConfigDict(run.config["config"]))


# Parts of a map of `two_timescale`, by the ratio of its rates.
_PARTS = {
    _SGD: lambda ratio: ratio == 1,
    _VALUES_FAST: lambda ratio: ratio > 1,  # EM-like
    _ROUTING_FAST: lambda ratio: ratio < 1,
}


def schedules(run: Run) -> list[Schedule]:
    """Every schedule of a run, with one sequence and with fresh ones.

    `two_timescale` of equal base rates is three: SGD where values and routing are
    equally fast, and those with faster values, as in EM, or faster routing.
    """
    config, points = run.config["config"], grid(run)
    found = []
    for fresh, regime in ((False, "one"), (True, "fresh")):
        here = points.fresh == fresh
        for row, arm in enumerate(config["run_arms"]):
            fields = config["arms"][arm]
            rates = {v for name, v in fields.items() if name.endswith("_rate")}
            parts = {arm: lambda ratio: ratio > 0}
            if not {"value_rate", "ridge"} & set(fields):  # all ratios are the same
                parts = {arm: lambda ratio: ratio == points.ratio[0]}
            if fields["schedule"] == "two_timescale" and len(rates) == 1:
                parts = _PARTS
            for name, belongs in parts.items():
                mine = np.flatnonzero(here & belongs(points.ratio))
                found.append(Schedule(name, regime, row, mine))
    return [schedule for schedule in found if len(schedule.points) > 0]


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
    config, curves = run.config["config"], run.metrics["heldout_kl"]
    num_seeds, threshold = config["seeds"], config["grid"]["threshold"]
    rows = curves.reshape(-1, curves.shape[-1])
    first = stats.first_reached(
        run.metrics["step"], rows, np.full(len(rows), float(threshold))
    )
    first = first.reshape(*curves.shape[:2], num_seeds)
    return np.where(report.stayed_finite(run), first, np.inf)


def tuned_times(run: Run) -> dict[str, np.ndarray]:
    """Steps to the threshold of each schedule, at rates that were tuned on others.

    Args:
      run: over a grid.

    Returns:
      Title of the schedule -> steps (n,), each seed at the point that was fastest over
      the others; inf if it never got there.
    """
    times = steps_to_threshold(run)
    seed = np.arange(run.config["config"]["seeds"])
    return {
        schedule.title: times[schedule.row, _by_time(run, times, schedule).others, seed]
        for schedule in schedules(run)
    }


def _by_time(run: Run, times: np.ndarray, schedule: Schedule) -> Tuned:
    # Who never got there took longer than any who did.
    most = 2 * run.config["config"]["steps"]
    return tuned(np.minimum(times[schedule.row], most), schedule.points)


def summarise(run: Run, wall_seconds: dict[str, float]) -> dict[str, Any]:
    """What a program reads of a run over a grid.

    Args:
      run: metrics and config.
      wall_seconds: "compile" and "run".

    Returns:
      The content of summary.json: as of a run without a grid, with an arm for each
      schedule and way of drawing sequences, at rates tuned on the other seeds.
    """
    config = run.config["config"]
    chance = math.log(report.num_classes(run))
    ends = report.final_metrics(run)
    seed = np.arange(config["seeds"])
    times = steps_to_threshold(run)

    arms, at_best, time_at_best = {}, {}, tuned_times(run)
    for schedule in schedules(run):
        row = schedule.row
        by_kl = tuned(ends["heldout_kl"][row], schedule.points)
        by_time = _by_time(run, times, schedule)
        chosen = {name: ends[name][row, by_kl.others, seed] for name in METRICS}
        at_best[schedule.title] = chosen
        runs = ends["train_loss"][row, schedule.points]
        best, fastest = (
            _point(run, schedule, choice.best) for choice in (by_kl, by_time)
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
        since = run.metrics["diverged_step"][row, by_kl.others, seed]
        since = since[since >= 0]
        arms[schedule.title] = entry | {
            **report.divergence_entry(since),
            "flags": _flags(run, schedule, by_kl, chosen, since, chance) + edges,
            "best": best,
            "fastest": fastest,
            "steps_to_threshold": report.times_entry(time_at_best[schedule.title]),
            "grid_diverged": int(np.isnan(runs).sum()),
            "grid_runs": int(runs.size),
        }
    comparisons = _comparisons(run, at_best, time_at_best)
    return {
        "config": config["name"],
        "steps": config["steps"],
        "seeds": config["seeds"],
        "first_evaluation": int(run.metrics["step"][1]),
        "complete": True,
        "wall_seconds": wall_seconds,
        "trained_with": report.trained_with(run),
        "floors": report.floors(run, {name: v[0, 0] for name, v in ends.items()}),
        "grid": config["grid"],
        "arms": arms,
        "baseline": BASELINE,
        "comparisons": comparisons,
        "claims": _claims(comparisons),
    }


def _point(run: Run, schedule: Schedule, index: int) -> dict[str, Any]:
    points = grid(run)

    def at_edge(axis: np.ndarray) -> bool:
        # An axis that the schedule has one value of has no edge for it.
        varied = len(np.unique(axis[schedule.points])) > 1
        return bool(varied and axis[index] in (axis.min(), axis.max()))

    return {
        "scale": float(f"{points.scale[index]:g}"),
        "ratio": float(f"{points.ratio[index]:g}"),
        "at_edge": at_edge(points.scale) or at_edge(points.ratio),
    }


def _flags(
    run: Run,
    schedule: Schedule,
    choice: Tuned,
    chosen: dict,
    since: np.ndarray,
    chance: float,
) -> list[str]:
    seed = np.arange(len(choice.others))
    gap = run.metrics["train_loss"] - run.metrics["train_bayes_nll"]
    gap = gap[schedule.row, choice.others, seed]
    return report.flags(
        diverged=since,
        below_bayes=int(
            report.beats_bayes(gap, fresh=schedule.regime == "fresh").sum()
        ),
        way=report.way_to_bayes(chosen, chance),
        seeds=len(seed),
    )


def _comparisons(
    run: Run, at_best: dict[str, dict], times: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    found = []
    for schedule in schedules(run):
        baseline = f"{BASELINE}/{schedule.regime}"
        if schedule.name == BASELINE or baseline not in at_best:
            continue
        ours, theirs = at_best[schedule.title], at_best[baseline]
        time, base_time = times[schedule.title], times[baseline]
        found.append(
            {
                "arm": schedule.title,
                "baseline": baseline,
                "paired_difference": {
                    name: report.difference_entry(
                        stats.cross_fitted_difference(ours[name], theirs[name])
                    )
                    for name in METRICS
                },
                "steps_to_threshold": report.times_entry(time),
                "speedup": report.speedup_entry(
                    stats.median_ratio(base_time, time, run.metrics["step"])
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
            report.claim_entry(
                report.Claim(
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


csv_table = report.csv_table
_NO_SGD = "No comparison: SGD, two_timescale at ratio 1, is not on the grid."


def terminal(summary: dict[str, Any]) -> str:
    """The report for a terminal of 80 columns."""
    blocks = [
        f"{summary['config']}: {summary['seeds']} seeds, {summary['steps']} steps; each"
        " schedule at the rates that\nwere best on the other seeds; mean ± half a 95 %"
        " interval",
        report.text_table(_main_table(summary)),
        report.floor_line(summary),
        f"Steps to a held-out KL of {summary['grid']['threshold']:g} (seeds that got"
        " there) at the rates that\nwere fastest on the other seeds, and speed-up over"
        f" sgd; medians{report.of_medians(summary)}",
        report.text_table(_speed_table(summary)),
        report.claim_block(summary, "Tuned against tuned, paired differences held out")
        or _NO_SGD,
        report.flag_block(summary),
        report.trained_block(summary),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def opening(summary: dict[str, Any]) -> str:
    """What tuning says of the paper's claim, as a paragraph."""
    return (
        f"{summary['seeds']} seeds, each schedule on each seed at the rates that were"
        " best on the others, by distance to Bayes held out. "
        + (report.verdict_sentences(summary) or _NO_SGD)
    )


def markdown(summary: dict[str, Any], figures: Mapping[str, str]) -> str:
    """The content of report.md.

    Args:
      summary: from `summarise`.
      figures: paths of the pictures, relative to the report -> their captions.
    """
    wall = summary["wall_seconds"]
    grid_of = summary["grid"]
    parts = [
        f"# {summary['config']}",
        f"{len(grid_of['ratio'])} ratios x {len(grid_of['scale'])} scales,"
        f" {summary['seeds']} seeds, {summary['steps']} steps;"
        f" {wall['compile']:.0f} s compiling, {wall['run']:.0f} s running.",
        *report.trained_section(summary),
        opening(summary),
        "## Tuned against tuned",
        "Mean over seeds ± half a 95 % interval (Student's, widened as scores that were"
        " tuned on each other's seeds hang together), in nats, at the end, each seed at"
        " the point that was best (mean held-out KL) over the other seeds."
        " `best` is the point, scale x ratio, that is best over all. scale: rate of"
        " W_Q, W_K and W_O; ratio: how many times faster W_V moves, and for M-steps in"
        " closed form what their ridge is divided by. One gradient with two rates is"
        " `sgd` at ratio 1, `values_fast` (EM-like) above and `routing_fast` below;"
        " div.: share of all the map's runs that diverged.",
        report.markdown_table(_main_table(summary)),
        report.floor_line(summary),
        "## How fast",
        f"Steps to the first evaluation with a held-out KL to Bayes of"
        f" {grid_of['threshold']:g} nats, at the point that was fastest over the other"
        " seeds; speed-up over sgd, tuned likewise. Medians over seeds"
        f"{report.of_ratios(summary)}; a seed that never got there counts as slower"
        " than any that did.",
        report.markdown_table(_speed_table(summary)),
    ]
    parts += report.claim_section(summary) + report.flag_section(summary)
    parts += report.picture_section(figures)
    return "\n\n".join(parts) + "\n"


def _main_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["schedule", "KL to Bayes", "train loss", "held-out loss", "best", "div."]]
    for title, entry in summary["arms"].items():
        rows.append(
            [
                title,
                *(
                    report.mean(entry[name])
                    for name in ("heldout_kl", "train_loss", "heldout_loss")
                ),
                _point_cell(entry["best"]),
                f"{entry['grid_diverged'] / entry['grid_runs']:.0%}",
            ]
        )
    return rows


def _point_cell(point: dict[str, Any] | None) -> str:
    return "none" if point is None else f"{point['scale']:g} x {point['ratio']:g}"


def _speed_table(summary: dict[str, Any]) -> list[list[str]]:
    speedups = {entry["arm"]: entry["speedup"] for entry in summary["comparisons"]}
    rows = [["schedule", "fastest", "steps", "speed-up"]]
    for title, entry in summary["arms"].items():
        rows.append(
            [
                title,
                _point_cell(entry["fastest"]),
                report.steps_cell(entry["steps_to_threshold"], summary),
                report.speedup_cell(speedups[title]) if title in speedups else "",
            ]
        )
    return rows
