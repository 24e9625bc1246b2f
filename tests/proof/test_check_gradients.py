"""The command, and what it prints and writes."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from jaxattn import experiments
from jaxattn.cli import check as check_command
from jaxattn.cli import command
from jaxattn.proof import check, first_order
from jaxattn.proof import prove as proof
from jaxattn.runs import write
from jaxattn.theory import laws

ROOT = Path(__file__).parents[2]
CONFIG = "--config=configs/gradients.py:smoke"


class Done(NamedTuple):
    """A run of the command."""

    returncode: int
    stdout: str
    stderr: str
    workdir: Path


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory):
    """A run whose float32 bound no arithmetic can keep."""
    workdir = tmp_path_factory.mktemp("runs") / "gradients"
    bound = "--config.bounds.float32=1e-9"
    line = ["scripts/check_gradients.py", CONFIG, bound, f"--workdir={workdir}"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.run(check_command.COMMAND, line)
    return Done(code, out.getvalue(), err.getvalue(), workdir)


@pytest.mark.slow
def test_a_broken_bound_is_exit_code_1(broken_run):
    done = broken_run
    assert done.returncode == 1, done.stderr
    assert "BROKEN compatibility: " in done.stdout
    assert "> 1e-09 against autodiff,\n  f32, " in done.stdout
    assert "\ncompatibility              !f64" in done.stdout
    assert "\n  f64, " not in done.stdout  # the other precision holds
    assert "gradients-smoke: 100 % shares, " in done.stderr  # progress
    assert sorted(path.name for path in done.workdir.iterdir()) == [
        "config.json",
        "report.txt",
        "summary.json",
    ]


@pytest.mark.slow
def test_the_table_and_the_json_say_the_same(broken_run):
    done = broken_run
    summary = json.loads((done.workdir / "summary.json").read_text())
    assert proof.terminal(summary) == (done.workdir / "report.txt").read_text()
    assert proof.terminal(summary) in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    assert summary["holds"] is False
    assert summary["seeds"] == 8
    assert min(entry["weighed"] for entry in summary["laws"].values()) > 0
    errors = summary["laws"]["score_gradient"]["errors"]
    assert list(errors) == ["float64", "float32"]
    for by_transformation in errors.values():
        assert list(by_transformation) == ["bare", "jit", "vmap", "both"]
        for by_witness in by_transformation.values():
            assert list(by_witness) == ["autodiff", "difference"]
    assert errors["float64"]["both"]["autodiff"] < 1e-12
    assert {fault["precision"] for fault in summary["broken"]} == {"float32"}
    for slope in summary["slopes"].values():
        assert abs(slope["least"] - 2) < 0.05
        assert abs(slope["largest"] - 2) < 0.05
    assert summary["share_steps"] == [[0, 2], [2, 4], [4, 6]]
    for sequences in ("one sequence", "fresh ones"):
        own = summary["shares"][f"sgd, {sequences}"]["own"]
        assert all(0.9 < third["mean"] < 1.1 and third["n"] == 2 for third in own)


@pytest.fixture
def summary():
    """Two laws and one slope, as a run writes them."""

    def error(value):
        return {"autodiff": value, "difference": value}

    errors = {
        precision: {t: error(1e-16) for t in ("bare", "jit", "vmap", "both")}
        for precision in ("float64", "float32")
    }
    law = {"weighed": 8, "errors": errors}
    estimate = {"mean": 1.0, "std": 0.1, "ci95": [0.9, 1.1], "n": 8}
    return {
        "config": "gradients",
        "seeds": 8,
        "bounds": {"float64": 1e-12, "float32": 1e-5, "difference": 1e-6},
        "shapes": [{}],
        "laws": {"advantage": law, "scores": copy.deepcopy(law)},
        "broken": [],
        "slopes": {
            "values, sticky": {"least": 2.0, "median": 2.0, "largest": 2.0, "n": 1}
        },
        "slope_tolerance": 0.05,
        "decades": 5,
        "shares": {"sgd, one sequence": {"own": [estimate] * 3}},
        "share_steps": [[0, 2], [2, 4], [4, 6]],
    }


def test_a_summary_that_holds_says_so(summary):
    said = proof.terminal(summary)
    assert said.endswith("All laws hold.\n")
    assert max(map(len, said.splitlines())) <= 80


def test_what_does_not_hold_is_named(summary):
    summary["laws"]["advantage"]["weighed"] = 0
    summary["slopes"]["values, sticky"]["least"] = 1.5
    summary["laws"]["scores"]["errors"]["float32"]["jit"]["autodiff"] = None
    fault = {"law": "scores", "precision": "float32", "witness": "autodiff"}
    fault |= {"bound": 1e-5, "seed": 5, "kind": "one-hot", "shape": {}}
    summary["broken"] = [
        fault | {"transformation": "bare", "error": 0.5},
        fault | {"transformation": "jit", "error": None},
    ]
    said = proof.terminal(summary)
    assert "All laws hold" not in said
    assert (
        "BROKEN scores: inf > 1e-05 against autodiff,\n  f32, jit, in problem 5" in said
    )
    assert "BROKEN order of values, sticky: slope 1.5000 to 2.0000" in said
    assert "NOT TESTED advantage" in said
    assert "\nscores                     !f64" in said
    assert max(map(len, said.splitlines())) <= 80
    summary["slopes"]["values, sticky"] |= {"least": None, "largest": None}
    assert "slope none to none" in proof.terminal(summary)


@pytest.mark.slow
def test_a_nan_reaches_the_summary_and_the_disk(monkeypatch, tmp_path):
    """The failure that it is all for must not end in a traceback."""
    right = laws.value_gradient
    monkeypatch.setattr(
        laws, "value_gradient", lambda a, u: right(a, u).at[0, 0].set(jnp.nan)
    )
    monkeypatch.setattr(check, "PASSES", (("float64", "jit"),))
    monkeypatch.setattr(check, "TRANSFORMATIONS", ("jit",))
    monkeypatch.setattr(check, "PRECISIONS", {"float64": jnp.float64})
    monkeypatch.setattr(first_order, "COORDINATES", {"values": first_order.free_values})
    config = experiments.load("configs/gradients.py:smoke").config
    config.slopes.problems = 1
    summary = proof.prove(experiments.resolve(config), lambda what, done: None)
    assert summary["holds"] is False
    said = proof.terminal(summary)
    assert "BROKEN value_gradient: inf" in said
    assert "BROKEN order of values, random: slope none to none" in said
    write.write_summary(tmp_path, summary)
    errors = json.loads((tmp_path / "summary.json").read_text())["laws"]
    assert errors["value_gradient"]["errors"]["float64"]["jit"]["autodiff"] is None


def test_the_reference_run_is_of_the_config():
    folder = ROOT / "results" / "gradients"
    config = experiments.load("configs/gradients.py").config
    held = json.loads((folder / "config.json").read_text())["config"]
    assert held == json.loads(json.dumps(config.to_dict()))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["holds"] is True
    assert proof.terminal(summary) == (folder / "report.txt").read_text()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--config.bounds.float32=-1", "a number from 0 to 1"),
        ("--config.seeds=abc", "an integer from 1 to 100000"),
        ("--config.longest=2", "an integer from 3"),
        ("--config.run_arms=lion", "unknown arm 'lion'"),
        ("--config.slopes.decades=3", "a number from 4 to 12"),
        ("--config.shape=3", "did you mean 'shapes', "),
        ("--config=sticky", "is not for this command; use jaxattn train"),
        ("extra", "unexpected argument 'extra'"),
        ("--html", "--html: no such flag"),
        ("--config.arms.sgd.learning_rate=fast", "arms.sgd.learning_rate='fast'"),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(tmp_path, capsys, argument, said):
    workdir = tmp_path / "run"
    line = ["scripts/check_gradients.py", CONFIG, argument, f"--workdir={workdir}"]
    assert command.run(check_command.COMMAND, line) == 2
    printed, error = capsys.readouterr()
    assert error.startswith("check_gradients.py: ")
    assert said in error
    assert error.count("\n") == 1
    assert printed == ""
    assert not workdir.exists()


def test_every_config_has_work():
    for variant in ("", ":smoke"):
        config = experiments.load(f"configs/gradients.py{variant}").config
        assert proof.work(experiments.resolve(config)) > 9
