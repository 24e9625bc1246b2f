"""The real command."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxattn import runs

ROOT = Path(__file__).parents[1]
FILES = [
    "config.json",
    "figures",
    "metrics.json",
    "metrics.npz",
    "report.md",
    "summary.csv",
    "summary.json",
]
# One arm, so that little is compiled.
SMALL = ("--config=configs/sticky.py:smoke", "--config.run_arms=sgd")


def command(*arguments):
    return [sys.executable, "scripts/train.py", *map(str, arguments)]


def train(*arguments):
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_smoke_writes_a_whole_run(tmp_path):
    workdir = tmp_path / "run"
    done = train("--config=configs/sticky.py:smoke", f"--workdir={workdir}", "--pdf")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in workdir.iterdir()) == FILES
    assert len(list((workdir / "figures").iterdir())) == 6
    assert "step 20/20" in done.stderr
    for needed in ("sgd_matched", "KL to Bayes", "entropy rate", "speed-up"):
        assert needed in done.stdout
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["complete"] is True
    assert list(summary["arms"]) == ["sgd", "em", "em_majorised", "sgd_matched"]
    assert "EM over SGD, script's rates (train loss" in done.stdout


def test_a_grid_writes_a_whole_run(tmp_path):
    done = train(
        "--config=configs/rates.py:smoke",
        "--config.run_arms=two_timescale",
        "--config.gradient=autodiff",
        "--config.grid.ratio=1,10",
        f"--workdir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    pictures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert pictures == ["gap.png", "kl.png", "steps.png", "tuned.png"]
    assert "2 seeds x 8 points" in done.stdout
    summary = runs.load(tmp_path).summary
    assert list(summary["arms"]) == [
        f"{name}/{regime}"
        for regime in ("one", "fresh")
        for name in ("sgd", "values_fast")
    ]


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path):
    done = train(
        *SMALL, "--config.steps=1e1", "--config.seeds", 1, f"--workdir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert runs.load(tmp_path).summary["steps"] == 10
    assert runs.load(tmp_path).summary["seeds"] == 1


BAD = {
    "--config.sedes=3": "sedes='3': no such field, did you mean 'seeds'?",
    "--config.seeds=0": "seeds=0: allowed: a whole number from 1",
    "--config.steps=-1": "steps=-1: allowed: a whole number from 1",
    "--config.steps=1.5": "steps='1.5': allowed: a whole number from 1",
    "--config.task.stay=1.2": "task.stay=1.2: allowed: a number from 0 to 1",
    "--config.task.stay=nan": "task.stay=nan: allowed: a number from 0 to 1",
    "--config.model.d_k=0": "model.d_k=0: allowed: a whole number from 1",
    "--config.task.length=1": "task.length=1: allowed: a whole number from 2",
    "--config.arms.sgd.learning_rate=-1": "arms.sgd.learning_rate=-1.0: allowed: a n",
    "--config.arms.em.value_rate=nan": "arms.em.value_rate=nan: allowed: a number fr",
    "--config.run_arms=sgd,me": "unknown arm 'me'",
    "--config.arms.adam.optimizer=adan": "arms.adam.optimizer='adan': allowed: one of",
    "--config=configs/sticky.py:smok": "variant='smok': unknown, did you mean 'smoke'",
    "--config=configs/stick.py": "config='configs/stick.py': no such file",
    "--confg=configs/sticky.py": "confg",
    "extra": "unexpected argument 'extra'",
}


@pytest.mark.parametrize(
    "bad",
    [
        bad if number % 4 == 0 else pytest.param(bad, marks=pytest.mark.slow)
        for number, bad in enumerate(BAD)
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, bad):
    workdir = tmp_path / "run"
    done = train("--config=configs/sticky.py", f"--workdir={workdir}", bad)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("train.py: ")
    assert BAD[bad] in done.stderr
    assert done.stdout == ""
    assert not workdir.exists()


def test_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = train(*SMALL, f"--workdir={tmp_path / 'file' / 'run'}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "cannot be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_second_run_in_a_workdir_stops(tmp_path):
    with subprocess.Popen(
        command(*SMALL, "--config.steps=1e5", f"--workdir={tmp_path}"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as first:
        while "compiling" not in first.stdout.readline():
            assert first.poll() is None
        second = train(*SMALL, "--config.steps=1e5", f"--workdir={tmp_path}")
        first.kill()
    assert second.returncode == 2
    assert len(second.stderr.splitlines()) == 1
    assert "another run is at work in it" in second.stderr


def test_a_run_that_diverges_is_still_written(tmp_path):
    rate = "--config.arms.sgd.learning_rate=1e30"
    done = train(*SMALL, rate, f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "diverged in 2 of 2 seeds" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_no_config_is_an_error():
    done = train()
    assert done.returncode == 2
    assert "config: not given" in done.stderr


def test_finished_run_is_not_overwritten_by_another_config(tmp_path):
    assert train(*SMALL, f"--workdir={tmp_path}").returncode == 0
    before = (tmp_path / "summary.json").read_bytes()
    done = train(*SMALL, f"--workdir={tmp_path}", "--config.steps=30")
    assert done.returncode == 2
    assert "differs in steps" in done.stderr
    assert (tmp_path / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    "stop",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_stopped_run_goes_on_to_the_same_numbers(tmp_path, stop):
    arguments = (*SMALL, "--config.steps=3000", "--config.checkpoint_every=20")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(*arguments, f"--workdir={whole}").returncode == 0

    with subprocess.Popen(
        command(*arguments, f"--workdir={stopped}"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 60
        while not list(stopped.glob("checkpoints/[1-9]*0")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(stop)
    assert process.returncode == (-signal.SIGKILL if stop == signal.SIGKILL else 130)
    assert not (stopped / "summary.json").exists()

    again = train(*arguments, f"--workdir={stopped}")
    assert again.returncode == 0, again.stderr
    assert "going on from step" in again.stdout
    assert sorted(path.name for path in stopped.iterdir()) == FILES
    expected, actual = runs.load(whole).metrics, runs.load(stopped).metrics
    assert expected.keys() == actual.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)
