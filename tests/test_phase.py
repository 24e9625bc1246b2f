"""Tuned against tuned: rates are chosen on the other seeds, and the maps show it."""

import json
from pathlib import Path

import numpy as np
import pytest
from problems import result_of

from jaxattn.analysis import phase, runs
from jaxattn.engine import sweep
from jaxattn.experiments import config as config_lib
from jaxattn.experiments import one_head
from jaxattn.views import phase_figures

CONFIG = Path(__file__).parents[1] / "configs" / "rates.py"
SEEDS = 8


def a_config(**changes):
    config = config_lib.load(f"{CONFIG}:smoke")
    config.update_from_flattened_dict(
        {
            "seeds": SEEDS,
            "run_arms": ("two_timescale", "em_online"),
            "grid.scale": (0.1, 0.3, 1.0),
            "grid.ratio": (0.1, 1.0, 10.0),
            "grid.threshold": 0.100,
        }
        | changes
    )
    config_lib.check(config)
    return config


def curves_of(config):
    """KL at the end is |log(scale) - log(0.3)| + 0.05 (ratio is off by a decade) + ...

    so the middle scale is best, and ratio 0.1 for `two_timescale`; seed 7 goes its own
    way, and the largest rates diverge.
    """
    points = sweep.points(config)
    rng = np.random.default_rng(0)
    steps = sweep.evaluation_steps(config)
    shape = len(config.run_arms), len(points.scale), SEEDS, len(steps)
    metrics = {name: np.full(shape, 1.0, np.float32) for name in one_head.METRICS}
    far = np.abs(np.log(points.scale / 0.3)) + 0.05 * np.log10(points.ratio * 10)
    end = 0.05 + 0.1 * far[None, :, None] + 0.001 * rng.random(shape[:3])
    end[1] -= 0.02
    middle = np.flatnonzero(points.scale == np.float32(0.3))
    end[:, middle, 7] += 5.0
    kl = np.linspace(np.full(shape[:3], 0.4), end, len(steps), axis=-1)
    metrics["heldout_kl"] = kl.astype(np.float32)
    metrics["train_loss"] = kl.astype(np.float32) + 1.8
    metrics["heldout_loss"] = kl.astype(np.float32) + 1.9
    metrics["train_bayes_nll"][:] = 1.8
    metrics["heldout_bayes_nll"][:] = 1.9
    wild = np.flatnonzero((points.scale == 1) & (points.ratio == 10))
    for curves in metrics.values():
        curves[0, wild, 3, 1:] = np.nan
    return metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = a_config()
    folder = tmp_path_factory.mktemp("rates")
    result = result_of(config, curves_of(config))
    run = runs.write_metrics(folder, config, result)
    summary = phase.summarise(run, {"compile": 1.0, "run": 2.0})
    runs.write_summary(folder, summary)
    return runs.load(folder)


def test_axes_and_points_are_named(run):
    assert run.axes["axes"]["heldout_kl"] == ["arm", "point", "seed", "eval"]
    points = run.axes["coordinates"]["point"]
    assert len(points) == run.metrics["heldout_kl"].shape[1] == 2 * 3 * 3
    assert points[0] == {
        "fresh": False,
        "ratio": pytest.approx(0.1),
        "scale": pytest.approx(0.1),
    }
    assert points[-1]["fresh"]


def test_parts_of_the_two_timescale_map(run):
    points = phase.grid(run)
    found = {schedule.title: schedule.points for schedule in phase.schedules(run)}
    assert list(found) == [
        f"{name}/{regime}"
        for regime in ("one", "fresh")
        for name in ("sgd", "values_fast", "routing_fast", "em_online")
    ]
    assert (points.ratio[found["sgd/one"]] == 1).all()
    assert (points.ratio[found["values_fast/fresh"]] > 1).all()
    assert (points.ratio[found["routing_fast/fresh"]] < 1).all()
    assert points.fresh[found["values_fast/fresh"]].all()
    assert len(found["em_online/one"]) == 9


def test_a_seed_never_has_a_say_in_its_own_rates():
    cost = np.array([[1.0, 1.0, 9.0], [2.0, 2.0, 0.0], [np.nan, 0.0, 0.0]])
    choice = phase.tuned(cost, np.arange(3))
    # Point 2 diverged on seed 0, so only seed 0's own choice may fall on it.
    assert choice.best == 1
    np.testing.assert_array_equal(choice.others, [2, 1, 0])
    assert phase.tuned(cost, np.array([0])).best == 0


def test_summary_is_of_the_rates_chosen_on_the_others(run):
    entry = run.summary["arms"]["sgd/one"]
    # Seed 7 is bad at the scale that is best for the seven others, and is not spared;
    # without its own vote it cannot move away, and with it no other seed stays.
    assert entry["best"] == {"scale": 0.1, "ratio": 1.0, "at_edge": True}
    kl = run.metrics["heldout_kl"][0, :, :, -1]
    points = phase.grid(run)
    middle, left = (
        np.flatnonzero((points.scale == np.float32(s)) & (points.ratio == 1))[0]
        for s in (0.3, 0.1)
    )
    expected = [*kl[left, :7], kl[middle, 7]]
    assert entry["heldout_kl"]["mean"] == pytest.approx(np.mean(expected), rel=1e-6)
    assert entry["heldout_kl"]["n"] == SEEDS
    assert "best point at the edge of the grid" in entry["flags"]


def test_diverged_runs_are_counted(run):
    entry = run.summary["arms"]["values_fast/one"]
    assert (entry["grid_diverged"], entry["grid_runs"]) == (1, 3 * SEEDS)
    assert run.summary["arms"]["sgd/one"]["grid_diverged"] == 0


def test_claims_are_paired_on_the_seeds(run):
    claims = {claim["arm"]: claim for claim in run.summary["claims"]}
    assert set(claims) == set(run.summary["arms"]) - {"sgd/one", "sgd/fresh"}
    online = claims["em_online/fresh"]
    assert online["verdict"] == "better"
    assert online["paired_difference"]["bootstrap95"] is None
    assert online["paired_difference"]["mean"] == pytest.approx(-0.025, abs=5e-3)
    assert claims["values_fast/one"]["verdict"] == "worse"


def test_steps_to_the_threshold(run):
    times = phase.steps_to_threshold(run)
    kl = run.metrics["heldout_kl"]
    step = run.metrics["step"]
    for where in np.ndindex(times.shape):
        reached = [
            s for s, value in zip(step[1:], kl[where][1:], strict=True) if value <= 0.1
        ]
        finite = np.isfinite(kl[where]).all()
        assert times[where] == (reached[0] if reached and finite else np.inf)
    entry = run.summary["arms"]["em_online/fresh"]
    assert entry["steps_to_threshold"]["reached"] == SEEDS - 1
    assert entry["fastest"]["scale"] == pytest.approx(0.3)


def test_tables(run):
    terminal = phase.terminal(run.summary)
    lines = terminal.split("\nFlags")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert "em_online over SGD, fresh sequences (KL -0.0" in terminal
    markdown = phase.markdown(run.summary, {"figures/kl.png": "A map."})
    assert "**Better**: " in markdown
    assert "em_online over SGD, one sequence (KL -0.0" in markdown
    assert "![kl.png](figures/kl.png)\n\nA map." in markdown
    assert len(phase.csv_table(run.summary).splitlines()) == 1 + 8
    json.dumps(run.summary, allow_nan=False)


def test_maps_hold_the_numbers_of_the_run(run):
    maps = phase_figures.maps(run)
    kl = run.metrics["heldout_kl"][..., -1]
    np.testing.assert_allclose(maps["kl"].values, kl.mean(axis=-1))
    assert np.isnan(maps["kl"].values).sum() == 2
    gap = run.metrics["train_loss"] - run.metrics["heldout_loss"]
    np.testing.assert_allclose(maps["gap"].values, gap[..., -1].mean(axis=-1))
    times = np.median(phase.steps_to_threshold(run), axis=-1)
    shown = ~np.isnan(maps["steps"].values)
    np.testing.assert_array_equal(maps["steps"].values[shown], times[shown])
    assert np.isinf(maps["steps"].values).any()


def test_arrival_counts_seeds_at_points_tuned_on_the_others(run):
    data, step = phase_figures.arrival_data(run), run.metrics["step"]
    assert list(data) == list(run.summary["arms"])
    for title, entry in run.summary["arms"].items():
        found = entry["steps_to_threshold"]
        assert data[title].middle[-1] == found["reached"] / found["n"]
        assert (np.diff(data[title].middle) >= 0).all()
        if found["median"] is not None:
            at = np.searchsorted(step, found["median"])
            assert data[title].middle[at] >= 0.5


def test_pictures(run, tmp_path):
    names = phase_figures.draw(run, tmp_path / "figures", pdf=True)
    assert list(names) == ["tuned.png", "arrival.png", "kl.png", "steps.png", "gap.png"]
    for name in names:
        assert (tmp_path / "figures" / name).stat().st_size > 10_000
        assert (tmp_path / "figures" / name).with_suffix(".pdf").exists()


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("grid.scale", (1.0, 0.1), "rising, separated by commas"),
        ("grid.scale", (), "rising, separated by commas"),
        ("grid.ratio", (0.0, 1.0), "numbers from 1e-12"),
        ("grid.ratio", 1.0, "numbers from 1e-12"),
        ("grid.ratio", (1.0, 1.00000001), "numbers from 1e-12"),
        ("grid.fresh", (True, True), "false, true or both, separated by a comma"),
        ("grid.fresh", (1,), "false, true or both, separated by a comma"),
        ("grid.threshold", -0.1, "a number from 0"),
        ("seeds", 1, "a whole number from 2"),
    ],
)
def test_a_wrong_grid_is_named(field, value, allowed):
    config = a_config()
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(
        config_lib.ConfigError, match=f"^{field}=.*allowed: .*{allowed}"
    ):
        config_lib.check(config)


@pytest.mark.parametrize("field", ["fresh", "baseline", "snapshot_seeds"])
def test_fields_that_a_grid_does_not_use_are_refused(field):
    config = a_config()
    config[field] = True
    with pytest.raises(config_lib.ConfigError, match=f"^{field}=True: no such field"):
        config_lib.check(config)


def test_names_that_the_report_needs_are_refused():
    config = a_config()
    config.arms.sgd = config.arms.em_online
    config.run_arms = ("two_timescale", "sgd")
    with pytest.raises(config_lib.ConfigError, match="'sgd' names a part of the"):
        config_lib.check(config)
    config.arms.other = config.arms.two_timescale
    config.run_arms = ("two_timescale", "other")
    with pytest.raises(config_lib.ConfigError, match="two_timescale and other are"):
        config_lib.check(config)


def test_a_grid_without_sgd_says_so(tmp_path):
    config = a_config(**{"grid.ratio": (0.1, 10.0)})
    result = result_of(config, curves_of(config))
    run = runs.write_metrics(tmp_path, config, result)
    summary = phase.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["comparisons"] == []
    assert "No comparison: SGD" in phase.terminal(summary)
    assert "No comparison: SGD" in phase.markdown(summary, [])


def test_an_axis_with_one_value_has_no_edge():
    """SGD at the end of the grid's ratios is not at an edge of its own."""
    config = a_config(**{"grid.ratio": (1.0, 10.0)})
    points = sweep.points(config)
    one = phase.Schedule("sgd", "one", 0, np.flatnonzero(points.ratio == 1))
    run = runs.Run(Path(), {"config": config.to_dict()}, {}, {}, None)
    middle = np.flatnonzero((points.scale == np.float32(0.3)) & (points.ratio == 1))[0]
    assert not phase._point(run, one, middle)["at_edge"]
    assert phase._point(run, one, 0)["at_edge"]


def test_a_grid_from_the_command_line():
    config = a_config()
    config_lib.override(config, "grid.scale", "1e-2,0.5")
    config_lib.override(config, "grid.fresh", "true")
    config_lib.check(config)
    assert config.grid.scale == (0.01, 0.5)
    assert config.grid.fresh == (True,)
    with pytest.raises(
        config_lib.ConfigError, match=r"^grid.ratio='fast': allowed: num"
    ):
        config_lib.override(config, "grid.ratio", "fast")
