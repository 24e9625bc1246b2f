"""The numbers of a run of one head."""

import json
import math

import numpy as np
import pytest
from fake_runs import write_run
from made_up import ARMS, SEEDS, WALL

from jaxattn.analysis import entries, head, stats
from jaxattn.views import head_report, tables


def test_summary_has_what_the_contract_names(run):
    summary = run.attrs["summary"]
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
        for name in entries.METRICS:
            assert set(entry[name]) == {"mean", "std", "ci95", "n"}
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text)["arms"]["sgd"]["train_loss"]["n"] == SEEDS


def test_summary_estimates_over_seeds(run, made):
    expected = stats.estimate(made.curves["train_loss"][1, :, -1])
    assert (
        run.attrs["summary"]["arms"]["values_fast"]["train_loss"] == expected._asdict()
    )


def test_diverged_seeds_are_counted_and_left_out(run):
    adam = run.attrs["summary"]["arms"]["adam"]
    assert adam["diverged"] == 1
    assert adam["train_loss"]["n"] == SEEDS - 1
    assert run.attrs["summary"]["arms"]["sgd"]["diverged"] == 0
    assert adam["first_diverged_step"] == 100
    assert run.attrs["summary"]["arms"]["sgd"]["first_diverged_step"] is None


def test_flags(run):
    assert run.attrs["summary"]["arms"]["adam"]["flags"] == [
        "diverged in 1 of 8 seeds, the first at step 100",
        "train loss below the Bayes floor in 7 of 8 seeds",
        "held-out loss above chance in 7 of 8 seeds",
    ]
    assert run.attrs["summary"]["arms"]["values_fast"]["flags"] == []


def test_comparisons(run):
    em, adam = run.attrs["summary"]["comparisons"]
    assert (em["arm"], em["baseline"]) == ("values_fast", "sgd")
    difference = em["paired_difference"]["train_loss"]
    assert difference["mean"] == pytest.approx(-0.06)
    assert difference["ci95"] == pytest.approx((-0.06, -0.06))
    assert em["steps_to_baseline_final"] == {"median": 50, "reached": 8, "n": 8}
    assert em["speedup"]["median"] == 2.0
    # Some time before 50 against some time from 50 to 100, as far as was looked.
    assert em["speedup"]["ci95"] == (1.0, None)
    assert em["speedup"]["beyond"] == ("", "≥", ">")
    # The diverged seed never arrived: it is counted, not dropped.
    assert adam["steps_to_baseline_final"] == {"median": 50, "reached": 7, "n": 8}
    assert adam["speedup"]["ci95"] == (None, None)
    assert adam["speedup"]["beyond"] == ("<", "≥", ">")
    assert adam["speedup"]["n"] == 8
    assert tables.speedup_cell(em["speedup"]) == "≥2x [1, ∞]"
    assert tables.speedup_cell(adam["speedup"]) == "≥2x [0, ∞]"


def test_an_arm_is_as_fast_as_its_copy(tmp_path, config, made):
    """Also where the curve comes down early and then goes up, or just wobbles."""
    rng = np.random.default_rng(0)
    for values in made.curves.values():
        curve = rng.random((SEEDS, 3)) + np.array([1.0, 0.0, 0.0])
        curve[:4, 2] = curve[:4, 1] + 0.5
        values[:] = curve
    run = write_run(tmp_path, config, made.curves)  # none diverges
    for entry in head.summarise(run, WALL)["comparisons"]:
        for name in ("speedup", "heldout_speedup"):
            low, high = entry[name]["ci95"]
            assert (low or 0) <= 1 <= (high or np.inf)
            assert entry[name]["median"] in (1.0, None)  # None: both at once


def test_no_speedup_over_a_baseline_that_did_not_learn(tmp_path, config, made):
    made.curves["heldout_kl"][0, :, 2] = 5.0
    run = write_run(tmp_path, config, *made)
    em, _ = head.summarise(run, WALL)["comparisons"]
    assert em["heldout_speedup"]["median"] is None
    assert em["heldout_speedup"]["beyond"] == ("", "?", "")
    assert em["heldout_steps_to_baseline_final"]["n"] == 0
    assert em["speedup"]["median"] == 2.0


def test_no_verdict_on_an_arm_that_never_moved(tmp_path, config, made):
    curves = made.curves
    for name in ("heldout_loss", "heldout_kl", "train_loss"):
        curves[name][0] = curves[name][0, :, :1]
    run = write_run(tmp_path, config, *made)
    assert entries.moved(run).tolist() == [False, True, True]
    summary = head.summarise(run, WALL)
    assert summary["claims"]
    for claim in summary["claims"]:
        assert (claim["verdict"], claim["never_moved"]) == ("none", ["sgd"])
    reason = "none       fast values beat SGD, held out (sgd never moved)\n"
    assert reason in head_report.terminal(summary)
    assert "none, sgd never moved |" in head_report.markdown(summary, {})
    assert "**Held**" not in head_report.markdown(summary, {})


def test_way_to_bayes_where_bayes_is_no_better_than_chance():
    final = {
        "heldout_loss": np.array([0.68, 0.70, 0.68, 0.70, 0.6, 0.5]),
        "heldout_bayes_nll": np.array([0.7, 0.7, 0.693, 0.693, 0.5, 0.5]),
    }
    way = entries.progress_to_bayes(final, 0.693)
    np.testing.assert_allclose(way[[4, 5]], [0.093 / 0.193, 1.0])
    assert (way[[0, 2]] > 0).all()
    assert (way[[1, 3]] < 0).all()


def test_below_bayes_on_fresh_sequences_is_judged_on_average():
    lucky = np.array([[0.0, 0.1, -0.01, 0.1]])
    assert entries.beats_bayes(lucky, fresh=False)[0]
    assert not entries.beats_bayes(lucky, fresh=True)[0]
    assert entries.beats_bayes(lucky - 0.1, fresh=True)[0]
