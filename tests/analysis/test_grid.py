"""Tuned against tuned: rates are chosen on the other seeds, and the maps show it."""

import json

import numpy as np
import pytest
from fake_runs import write_run

from jaxattn import experiments, runs
from jaxattn.analysis import entries, grid
from jaxattn.experiments import Catalogue, Source
from jaxattn.fields import ConfigError
from jaxattn.runs import write
from jaxattn.views import grid_figures, grid_report, tables

SEEDS = 8


def a_config(**changes):
    config = experiments.load("configs/rates.py:smoke").config
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
    experiments.check(config)
    return config


def points_of(config):
    points = experiments.resolve(config).grid.points
    return grid.Points(**points)


def curves_of(config):
    """KL at the end is |log(scale) - log(0.3)| + 0.05 (ratio is off by a decade) + ...

    so the middle scale is best, and ratio 0.1 for `two_timescale`; seed 7 goes its own
    way, and the largest rates diverge.
    """
    points = points_of(config)
    rng = np.random.default_rng(0)
    steps = experiments.resolve(config).evaluation_steps()
    shape = len(config.run_arms), len(points.scale), SEEDS, len(steps)
    metrics = {name: np.full(shape, 1.0, np.float32) for name in entries.METRICS}
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
    run = write_run(folder, config, curves_of(config))
    summary = grid.summarise(run, {"compile": 1.0, "run": 2.0})
    write.write_summary(folder, summary)
    return runs.load(folder)


def test_axes_and_points_are_named(run):
    assert run["heldout_kl"].dims == ("arm", "point", "seed", "step")
    assert run.sizes["point"] == 2 * 3 * 3
    first = run.isel(point=0)
    assert not first.fresh
    assert (first.ratio, first.scale) == pytest.approx((0.1, 0.1))
    assert run.fresh[-1]
    fresh = run.heldout_kl.isel(point=run.fresh.values)
    assert fresh.sizes["point"] == 3 * 3


def test_parts_of_the_two_timescale_map(run):
    points = grid.points_of(run)
    found = {own.title: own.points for own in grid.contenders(run)}
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
    choice = grid.tuned(cost, np.arange(3))
    # Point 2 diverged on seed 0, so only seed 0's own choice may fall on it.
    assert choice.best == 1
    np.testing.assert_array_equal(choice.others, [2, 1, 0])
    assert grid.tuned(cost, np.array([0])).best == 0


def test_summary_is_of_the_rates_chosen_on_the_others(run):
    entry = run.attrs["summary"]["arms"]["sgd/one"]
    # Seed 7 is bad at the scale that is best for the seven others, and is not spared;
    # without its own vote it cannot move away, and with it no other seed stays.
    assert entry["best"] == {"scale": 0.1, "ratio": 1.0, "at_edge": True}
    kl = run["heldout_kl"].values[0, :, :, -1]
    points = grid.points_of(run)
    middle, left = (
        np.flatnonzero((points.scale == np.float32(s)) & (points.ratio == 1))[0]
        for s in (0.3, 0.1)
    )
    expected = [*kl[left, :7], kl[middle, 7]]
    assert entry["heldout_kl"]["mean"] == pytest.approx(np.mean(expected), rel=1e-6)
    assert entry["heldout_kl"]["n"] == SEEDS
    assert "best point at the edge of the grid" in entry["flags"]


def test_diverged_runs_are_counted(run):
    entry = run.attrs["summary"]["arms"]["values_fast/one"]
    assert (entry["grid_diverged"], entry["grid_runs"]) == (1, 3 * SEEDS)
    assert run.attrs["summary"]["arms"]["sgd/one"]["grid_diverged"] == 0


def test_claims_are_paired_on_the_seeds(run):
    claims = {claim["arm"]: claim for claim in run.attrs["summary"]["claims"]}
    assert set(claims) == set(run.attrs["summary"]["arms"]) - {"sgd/one", "sgd/fresh"}
    online = claims["em_online/fresh"]
    assert online["verdict"] == "better"
    assert online["paired_difference"]["bootstrap95"] is None
    assert online["paired_difference"]["mean"] == pytest.approx(-0.025, abs=5e-3)
    assert claims["values_fast/one"]["verdict"] == "worse"


def test_steps_to_the_threshold(run):
    times = grid.steps_to_threshold(run)
    kl = run["heldout_kl"].values
    step = run["step"].values
    for where in np.ndindex(times.shape):
        reached = [
            s for s, value in zip(step[1:], kl[where][1:], strict=True) if value <= 0.1
        ]
        finite = np.isfinite(kl[where]).all()
        assert times[where] == (reached[0] if reached and finite else np.inf)
    entry = run.attrs["summary"]["arms"]["em_online/fresh"]
    assert entry["steps_to_threshold"]["reached"] == SEEDS - 1
    assert entry["fastest"]["scale"] == pytest.approx(0.3)


def test_tables(run):
    terminal = grid_report.terminal(run.attrs["summary"])
    lines = terminal.split("\nFlags")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert "em_online over SGD, fresh sequences (KL -0.0" in terminal
    markdown = grid_report.markdown(run.attrs["summary"], {"figures/kl.png": "A map."})
    assert "**Better**: " in markdown
    assert "em_online over SGD, one sequence (KL -0.0" in markdown
    assert "![kl.png](figures/kl.png)\n\nA map." in markdown
    assert len(tables.csv_table(run.attrs["summary"]).splitlines()) == 1 + 8
    json.dumps(run.attrs["summary"], allow_nan=False)


def test_maps_hold_the_numbers_of_the_run(run):
    maps = grid_figures.maps(run)
    kl = run["heldout_kl"].values[..., -1]
    np.testing.assert_allclose(maps["kl"].values, kl.mean(axis=-1))
    assert np.isnan(maps["kl"].values).sum() == 2
    gap = run["train_loss"].values - run["heldout_loss"].values
    np.testing.assert_allclose(maps["gap"].values, gap[..., -1].mean(axis=-1))
    times = np.median(grid.steps_to_threshold(run), axis=-1)
    shown = ~np.isnan(maps["steps"].values)
    np.testing.assert_array_equal(maps["steps"].values[shown], times[shown])
    assert np.isinf(maps["steps"].values).any()


def test_arrival_counts_seeds_at_points_tuned_on_the_others(run):
    data, step = grid_figures.arrival_data(run), run["step"].values
    assert list(data) == list(run.attrs["summary"]["arms"])
    for title, entry in run.attrs["summary"]["arms"].items():
        found = entry["steps_to_threshold"]
        assert data[title].middle[-1] == found["reached"] / found["n"]
        assert (np.diff(data[title].middle) >= 0).all()
        if found["median"] is not None:
            at = np.searchsorted(step, found["median"])
            assert data[title].middle[at] >= 0.5


def test_pictures(run, tmp_path):
    names = grid_figures.draw(run, tmp_path / "figures", pdf=True)
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
        ("seeds", 1, "an integer from 2"),
    ],
)
def test_a_wrong_grid_is_named(field, value, allowed):
    config = a_config()
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(ConfigError, match=f"^{field}=.*must .*{allowed}"):
        experiments.check(config)


@pytest.mark.parametrize("field", ["fresh", "baseline", "snapshot_seeds"])
def test_fields_that_a_grid_does_not_use_are_refused(field):
    config = a_config()
    config[field] = True
    with pytest.raises(ConfigError, match=f"^{field}=True: no such field"):
        experiments.check(config)


def test_names_that_the_report_needs_are_refused():
    config = a_config()
    config.arms.sgd = config.arms.em_online
    config.run_arms = ("two_timescale", "sgd")
    with pytest.raises(ConfigError, match="'sgd' is what a part of the map"):
        experiments.check(config)
    config.arms.other = config.arms.two_timescale
    config.run_arms = ("two_timescale", "other")
    with pytest.raises(ConfigError, match="two_timescale and other map"):
        experiments.check(config)


def test_a_grid_without_sgd_says_so(tmp_path):
    config = a_config(**{"grid.ratio": (0.1, 10.0)})
    run = write_run(tmp_path, config, curves_of(config))
    summary = grid.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["comparisons"] == []
    assert "No comparison: SGD" in grid_report.terminal(summary)
    assert "No comparison: SGD" in grid_report.markdown(summary, [])


def test_an_axis_with_one_value_has_no_edge():
    """SGD at the end of the grid's ratios is not at an edge of its own."""
    config = a_config(**{"grid.ratio": (1.0, 10.0)})
    points = points_of(config)
    one = grid.Contender("sgd", "one", 0, np.flatnonzero(points.ratio == 1))
    middle = np.flatnonzero((points.scale == np.float32(0.3)) & (points.ratio == 1))[0]
    assert not grid.point_entry(points, one, middle)["at_edge"]
    assert grid.point_entry(points, one, 0)["at_edge"]


def test_a_grid_from_the_command_line():
    config = a_config()
    source = Source(config, Catalogue(), "", {})
    changes = [("grid.scale", "1e-2,0.5"), ("grid.fresh", "true")]
    experiments.overridden(source, changes)
    experiments.check(config)
    assert config.grid.scale == (0.01, 0.5)
    assert config.grid.fresh == (True,)
    with pytest.raises(ConfigError, match=r"^grid.ratio='fast': must be num"):
        experiments.overridden(source, [("grid.ratio", "fast")])
