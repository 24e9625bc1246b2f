"""The real command, and what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxattn import config as config_lib
from jaxattn import proof

ROOT = Path(__file__).parents[1]
CONFIG = "--config=configs/gradients.py:smoke"


def check_gradients(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/check_gradients.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory):
    """A run whose float32 bound no arithmetic can keep, and its workdir."""
    workdir = tmp_path_factory.mktemp("runs") / "gradients"
    done = check_gradients(
        CONFIG, "--config.bounds.float32=1e-9", f"--workdir={workdir}"
    )
    return done, workdir


@pytest.mark.slow
def test_a_broken_bound_is_exit_code_1(broken_run):
    done, workdir = broken_run
    assert done.returncode == 1, done.stderr
    assert "BROKEN compatibility: " in done.stdout
    assert "> 1e-09 against autodiff,\n  f32, " in done.stdout
    assert "\ncompatibility              !f64" in done.stdout
    assert "\n  f64, " not in done.stdout  # the other precision holds
    assert "shares: 100%" in done.stderr  # progress
    assert sorted(path.name for path in workdir.iterdir()) == [
        "config.json",
        "report.txt",
        "summary.json",
    ]


@pytest.mark.slow
def test_the_table_and_the_json_say_the_same(broken_run):
    done, workdir = broken_run
    summary = json.loads((workdir / "summary.json").read_text())
    assert proof.terminal(summary) == (workdir / "report.txt").read_text()
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


@pytest.mark.slow
def test_a_summary_that_holds_says_so(broken_run):
    _, workdir = broken_run
    summary = json.loads((workdir / "summary.json").read_text())
    summary["broken"] = []
    assert proof.terminal(summary).endswith("All laws hold.\n")
    summary["laws"]["advantage"]["weighed"] = 0
    assert "NOT WEIGHED advantage" in proof.terminal(summary)
    summary["slopes"]["values, sticky"]["least"] = 1.5
    assert "BROKEN order of values, sticky: slope 1.500" in proof.terminal(summary)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--config.bounds.float32=-1", "a number from 0 to 1"),
        ("--config.seeds=0", "a whole number from 1"),
        ("--config.run_arms=lion", "unknown arm 'lion'"),
        ("--config.slopes.decades=3", "a number from 4 to 12"),
        ("--config.shape=3", "did you mean 'shapes'?"),
        ("--config.arms.sgd.learning_rate=fast", "arms.sgd.learning_rate='fast'"),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(tmp_path, argument, said):
    workdir = tmp_path / "run"
    done = check_gradients(CONFIG, argument, f"--workdir={workdir}")
    assert done.returncode == 2
    assert done.stderr.startswith("check_gradients.py: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not workdir.exists()


def test_the_wrong_kind_of_config_is_named():
    done = check_gradients("--config=configs/sticky.py:smoke")
    assert done.returncode == 2
    assert "no such field" in done.stderr
    assert not (ROOT / "results" / "sticky-smoke").exists()
    with pytest.raises(config_lib.ConfigError, match="no such field"):
        config_lib.check(config_lib.load(str(ROOT / "configs/gradients.py")))


def test_every_config_passes_its_check():
    for variant in ("", ":smoke"):
        config = config_lib.load(str(ROOT / "configs/gradients.py") + variant)
        config_lib.check_proof(config)
        assert proof.work(config) > 9
