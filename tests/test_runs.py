"""The run directory, and what is read, tabled and drawn from it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxattn import config as config_lib
from jaxattn import figures, report, runs, stats, sweep

CONFIG = Path(__file__).parents[1] / "configs" / "sticky.py"
ARMS = ("sgd", "em", "adam")
SEEDS = 8


@pytest.fixture
def config():
    config = config_lib.load(f"{CONFIG}:smoke")
    config.update({"seeds": SEEDS, "steps": 100, "eval_every": 50, "run_arms": ARMS})
    return config


@pytest.fixture
def result():
    """Made-up numbers: em twice as fast as sgd, adam over-fits, its seed 3 diverges."""
    rng = np.random.default_rng(0)
    start = 2.1 + 0.01 * rng.random(SEEDS)
    fall = {"sgd": [0, 0.02, 0.04], "em": [0, 0.05, 0.1], "adam": [0, 0.3, 0.5]}
    train = np.stack([start[:, None] - np.array(fall[arm]) for arm in ARMS])
    curves = {name: np.ones((3, SEEDS, 3)) for name in sweep.METRICS}
    curves |= {"train_loss": train, "heldout_kl": train - 1.9, "heldout_loss": train}
    for curve in curves.values():
        curve[2, 3, 1:] = np.nan
    curves["heldout_loss"] = train + np.array([0, 0, 1])[:, None, None]
    return sweep.Result(
        step=np.array([0, 50, 100]),
        curves=curves,
        bayes_nll={"train": np.full(SEEDS, 1.9), "heldout": np.full(SEEDS, 1.91)},
        attention={
            "initial": np.tri(6) / np.arange(1, 7)[:, None],
            "final": np.stack([np.eye(6)] * 3),
        },
    )


@pytest.fixture
def run(tmp_path, config, result):
    run = runs.write_metrics(tmp_path, config, result)
    return run._replace(summary=report.summarise(run, {"compile": 1.0, "run": 2.0}))


def test_metrics_are_read_back_with_their_axes(run, result):
    for name in sweep.METRICS:
        np.testing.assert_array_equal(run.metrics[name], result.curves[name])
        assert run.axes["axes"][name] == ["arm", "seed", "eval"]
    for name, array in run.metrics.items():
        assert array.ndim == len(run.axes["axes"][name])
    assert run.axes["coordinates"] == {
        "arm": list(ARMS),
        "seed": list(range(SEEDS)),
        "eval": [0, 50, 100],
    }
    assert runs.load(run.path).summary is None


def test_config_says_what_the_numbers_depend_on(run, config):
    assert run.config["config"] == json.loads(json.dumps(config.to_dict()))
    assert {"jax", "jaxlib", "optax", "jaxattn"} <= run.config["versions"].keys()
    assert run.config["device"]["count"] >= 1
    assert run.config["git_commit"]
    assert run.config["prng_implementation"] == "threefry2x32"


def test_summary_has_what_the_contract_names(run):
    summary = run.summary
    assert {k: summary[k] for k in ("config", "steps", "seeds", "complete")} == {
        "config": "sticky-smoke",
        "steps": 100,
        "seeds": SEEDS,
        "complete": True,
    }
    assert summary["wall_seconds"] == {"compile": 1.0, "run": 2.0}
    assert summary["floors"]["chance"] == math.log(8)
    assert summary["floors"]["bayes_heldout_nll"]["mean"] == pytest.approx(1.91)
    assert summary["floors"]["entropy_rate"] == pytest.approx(1.883, abs=1e-3)
    assert list(summary["arms"]) == list(ARMS)
    for entry in summary["arms"].values():
        for name in sweep.METRICS:
            assert set(entry[name]) == {"mean", "std", "ci95", "n"}
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text)["arms"]["sgd"]["train_loss"]["n"] == SEEDS


def test_summary_estimates_over_seeds(run, result):
    expected = stats.estimate(result.curves["train_loss"][1, :, -1])
    assert run.summary["arms"]["em"]["train_loss"] == expected._asdict()


def test_diverged_seeds_are_counted_and_left_out(run):
    adam = run.summary["arms"]["adam"]
    assert adam["diverged"] == 1
    assert adam["train_loss"]["n"] == SEEDS - 1
    assert run.summary["arms"]["sgd"]["diverged"] == 0
    assert "diverged in 1 of 8 seeds" in adam["flags"]


def test_flags(run):
    assert run.summary["arms"]["adam"]["flags"] == [
        "diverged in 1 of 8 seeds",
        "train loss below the Bayes floor in 7 of 8 seeds",
        "held-out loss above chance in 7 of 8 seeds",
    ]
    assert run.summary["arms"]["em"]["flags"] == []


def test_comparisons(run):
    em, adam = run.summary["comparisons"]
    assert (em["arm"], em["baseline"]) == ("em", "sgd")
    difference = em["paired_difference"]["train_loss"]
    assert difference["mean"] == pytest.approx(-0.06)
    assert difference["ci95"] == pytest.approx((-0.06, -0.06))
    assert em["steps_to_baseline_final"] == {"median": 50, "reached": 8, "n": 8}
    assert em["speedup"] == {"median": 2.0, "ci95": (2.0, 2.0)}
    # The diverged seed never arrived: it is counted, not dropped.
    assert adam["steps_to_baseline_final"] == {"median": 50, "reached": 7, "n": 8}
    assert adam["speedup"]["ci95"] == (None, 2.0)


def test_no_comparison_without_the_baseline(tmp_path, config, result):
    config.baseline = "sgd_matched"
    run = runs.write_metrics(tmp_path, config, result)
    summary = report.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["comparisons"] == []
    assert "Steps to" not in report.terminal(summary)
    assert "Against" not in report.markdown(summary, [])


def test_report_fits_a_terminal_and_says_it_all(run):
    text = report.terminal(run.summary)
    assert max(map(len, text.splitlines())) <= 80
    for needed in (*ARMS, "chance 2.079", "2x [2, 2]", "50 (7/8)", "diverged in 1 of"):
        assert needed in text
    markdown = report.markdown(run.summary, ["figures/curves.png"])
    for needed in ("| em |", "](figures/curves.png)", "## Flags", "-0.060±0.000"):
        assert needed in markdown


def test_one_seed_has_no_interval(tmp_path, config, result):
    config.seeds = 1
    result = result._replace(
        curves={name: curve[:, :1] for name, curve in result.curves.items()},
        bayes_nll={name: value[:1] for name, value in result.bayes_nll.items()},
    )
    run = runs.write_metrics(tmp_path, config, result)
    summary = report.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["arms"]["sgd"]["train_loss"]["ci95"] is None
    assert "±" not in report.terminal(summary).split("\n\n", 1)[1]
    figures.draw(run._replace(summary=summary), tmp_path / "figures")


def test_csv_has_a_row_per_arm(run):
    rows = report.csv_table(run.summary).splitlines()
    assert len(rows) == 1 + len(ARMS)
    assert rows[0].startswith("arm,train_loss_mean,train_loss_std,")
    assert rows[1].startswith("sgd,2.06")


def test_figures_are_written(run):
    names = figures.draw(run, run.path / "figures", pdf=True)
    assert names == ["curves.png", "final.png", "attention.png"]
    for name in names:
        assert (run.path / "figures" / name).stat().st_size > 5000
        assert (run.path / "figures" / name).with_suffix(".pdf").exists()


def test_figures_when_every_seed_diverged(tmp_path, config, result):
    result.curves["train_loss"][2] = np.nan
    run = runs.write_metrics(tmp_path, config, result)
    summary = report.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["arms"]["adam"]["train_loss"]["mean"] is None
    assert "none" in report.terminal(summary)
    figures.draw(run._replace(summary=summary), tmp_path / "figures")


def test_band_is_student_s_at_each_point():
    curves = np.random.default_rng(0).normal(size=(5, 3))
    curves[4, 1] = np.nan
    band = figures.band(curves)
    for point in range(3):
        estimate = stats.estimate(curves[:4, point])
        assert band.mean[point] == pytest.approx(estimate.mean)
        assert (band.low[point], band.high[point]) == pytest.approx(estimate.ci95)


def test_staged_moves_everything_or_nothing(tmp_path):
    (tmp_path / "kept").write_text("old")
    with runs.staged(tmp_path) as stage:
        (stage / "figures").mkdir()
        (stage / "figures" / "a").write_text("a")
        (stage / "kept").write_text("new")
        assert (tmp_path / "kept").read_text() == "old"
    assert (tmp_path / "kept").read_text() == "new"
    assert (tmp_path / "figures" / "a").read_text() == "a"

    def fail():
        with runs.staged(tmp_path) as stage:
            (stage / "kept").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "kept").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "kept"]


def test_claim_refuses_another_config(tmp_path, config, result):
    runs.claim(tmp_path, config)
    with runs.staged(tmp_path) as stage:
        runs.write_metrics(stage, config, result)
    runs.claim(tmp_path, config)
    config.arms.em.value_rate = 0.2
    with pytest.raises(runs.RunError, match=r"differs in arms.em.value_rate\)"):
        runs.claim(tmp_path, config)


def test_claim_refuses_a_folder_that_cannot_be_written(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(runs.RunError, match="cannot be written"):
        runs.claim(tmp_path / "file" / "run", config)


def test_load_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(runs.RunError, match="not a finished run"):
        runs.load(tmp_path)


def test_checkpoint_comes_back_as_it_was(tmp_path, config):
    config.run_arms = ("em",)
    program = sweep.build(config, workers=2)
    start = sweep.start(program)
    assert runs.load_checkpoint(tmp_path, start) is None
    carry = sweep.advance(program, start)
    for saved in (start, carry, carry):
        runs.save_checkpoint(tmp_path, config, saved)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["50", "config.json"]
    restored = runs.load_checkpoint(tmp_path, start)
    assert int(restored.step) == 50
    expected, actual = (sweep.advance(program, c) for c in (carry, restored))
    for name in sweep.METRICS:
        np.testing.assert_array_equal(actual.curves[name], expected.curves[name])
    other = config.copy_and_resolve_references()
    other.steps = 99
    with pytest.raises(runs.RunError, match="an unfinished run of another config"):
        runs.claim(tmp_path, other)
