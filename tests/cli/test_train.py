"""Training by the command; as a process of its own where signals come in."""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxattn import runs
from jaxattn.cli import figures
from jaxattn.cli.command import keep_programs, run
from jaxattn.cli.train import COMMAND

ROOT = Path(__file__).parents[2]
FILES = [
    "config.json",
    "metrics.json",
    "metrics.npz",
    "report.md",
    "summary.csv",
    "summary.json",
]
# One arm and autodiff of short sequences, so that little is compiled.
QUICK = ("--config.gradient=autodiff", "--config.task.length=60")
SMALL = (
    *("--config=configs/sticky.py:smoke", "--config.run_arms=sgd", "--nofigures"),
    *("--config.diagnostics_length=0", "--config.snapshot_seeds=", *QUICK),
)


def command(*arguments):
    return [sys.executable, "scripts/train.py", *map(str, arguments)]


def train(*arguments):
    """Trains in this process."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = run(COMMAND, ["scripts/train.py", *map(str, arguments)])
    return SimpleNamespace(
        returncode=code, stdout=out.getvalue(), stderr=error.getvalue()
    )


def train_apart(*arguments, environment=None):
    """Trains in a process of its own."""
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def begin(*arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
    pipes = {"stdout": stdout, "stderr": stderr, "text": True}
    return subprocess.Popen(command(*arguments), cwd=ROOT, **pipes)


def test_smoke_writes_a_whole_run(tmp_path):
    workdir = tmp_path / "run"
    two = "--config.run_arms=sgd,values_fast"
    done = train(*SMALL, two, "--figures", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in workdir.iterdir()) == sorted(
        [*FILES, "figures"]
    )
    assert "(figures/curves.png)" in (workdir / "report.md").read_text()
    shares = [line.partition(", seeds 2/2, ")[0] for line in done.stderr.splitlines()]
    assert shares == [  # a line for each evaluation, of which there are few
        f"sticky-smoke: {25 * n} % step {5 * n}/20" for n in range(1, 5)
    ]
    assert "\ndrawing figures ...\n" in done.stdout
    for needed in ("values_fast", "KL to Bayes", "entropy rate", "speed-up"):
        assert needed in done.stdout
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["complete"] is True
    assert list(summary["arms"]) == ["sgd", "values_fast"]
    assert "fast values beat SGD (train loss" in done.stdout


def test_a_grid_writes_a_whole_run(tmp_path):
    done = train(
        "--config=configs/rates.py:smoke",
        "--config.run_arms=two_timescale",
        "--config.gradient=autodiff",
        "--config.grid.ratio=1,10",
        "--nofigures",
        f"--workdir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert "2 seeds x 8 points" in done.stdout
    summary = runs.load(tmp_path).attrs["summary"]
    assert list(summary["arms"]) == [
        f"{name}/{regime}"
        for regime in ("one", "fresh")
        for name in ("sgd", "values_fast")
    ]


@pytest.mark.slow
def test_figures_are_drawn_by_their_own_command(tmp_path):
    assert train(*SMALL, *LOOKED_AT, f"--workdir={tmp_path}").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES

    def draw(*arguments):
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            line = ["scripts/figures.py", *map(str, arguments)]
            code = run(figures.COMMAND, line)
        return SimpleNamespace(
            returncode=code, stdout=out.getvalue(), stderr=error.getvalue()
        )

    done = draw(tmp_path, "--html")
    assert done.returncode == 0, done.stderr
    for name in ("figures/motion.gif", "figures/curves.png", "report.html"):
        assert f"{tmp_path / name}\n" in done.stdout
        assert (tmp_path / name).stat().st_size > 5000
    none = draw(tmp_path / "none")
    assert none.returncode == 2
    assert none.stderr.startswith("figures.py: run=")
    assert none.stderr.count("\n") == 1


def test_integers_may_be_written_with_an_exponent(tmp_path):
    done = train(
        *SMALL, "--config.steps=1e1", "--config.seeds", 1, f"--workdir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert runs.load(tmp_path).attrs["summary"]["steps"] == 10
    assert runs.load(tmp_path).attrs["summary"]["seeds"] == 1


PROCESSES = "--coordinator=localhost:1234 --processes=2"
BAD = {
    "--config.sedes=3": "sedes='3': no such field, did you mean 'seeds', ",
    "--config.seeds=0": "seeds=0: must be an integer from 1",
    "--config.steps=-1": "steps=-1: must be an integer from 1",
    "--config.steps=1.5": "steps='1.5': must be an integer from 1",
    "--config.steps": "steps='': must be an integer from 1",
    "--config.task.stay=1.2": "task.stay=1.2: must be a number from 0 to 1",
    "--config.task.stay=nan": "task.stay=nan: must be a number from 0 to 1",
    "--config.model.d_k=0": "model.d_k=0: must be an integer from 1",
    "--config.task.length=1": "task.length=1: must be an integer from 2",
    "--config.arms.sgd.learning_rate=-1": "arms.sgd.learning_rate=-1.0: must be a n",
    "--config.arms.sgd.learning_rate=0": "arms.sgd.learning_rate=0.0: the baseline",
    "--config.arms.values_fast.value_rate=nan": "value_rate=nan: must be a number",
    "--config.snapshot_seeds=0,8": "snapshot_seeds=8: must be an integer",
    "--config.run_arms=sgd,me": "unknown arm 'me'",
    "--config.run_arms=": "run_arms=(): must be names",
    "--config.run_arms=adam": "baseline='sgd': does not run; must be one of run",
    "--config.arms.adam.optimizer=adan": "arms.adam.optimizer='adan': must be one of",
    "--config=configs/sticky.py:smok": "variant='smok': unknown, did you mean 'smoke'",
    "--config=configs/stick.py": "config='configs/stick.py': no such file",
    "--config=gradients": "experiment='proof': is not for this command; use",
    "--config=": "--config=: must be text that is not empty",
    "--confg=configs/sticky.py": "--confg: no such flag, did you mean 'config'?",
    "--workdir=": "--workdir=: must be text that is not empty",
    "--workers=-1": "--workers=-1: must be an integer from 0",
    "--workers=": "--workers=: must be an integer from 0",
    "--html=maybe": "--html=maybe: must be true or false",
    "--memory_share=nan": "--memory_share=nan: must be a number from 0 to 1",
    "--checkpoint_seconds=nan": "--checkpoint_seconds=nan: must be a number from 0",
    "--pdf --nofigures": "pdf=True: must be left out with --nofigures",
    "--weights": "weights=True: must be left out but with trans",
    "--coordinator=localhost": "coordinator='localhost', processes=None, p",
    "--coordinator=localhost:99999 --processes=2 --process=0": "a port from 1 to 65535",
    "--coordinator=localhost:0 --processes=2 --process=0": "a port from 1 to 65535",
    "--coordinator=localhost --processes=2 --process=0": "HOST:PORT of process 0",
    f"{PROCESSES} --process=2": "process=2: must be an integer from 0 to 1 with",
    "--distributed --coordinator=localhost:1234": "distributed=True, coordinator='loc",
    "--distributed --process=0": "distributed=True, process=0: must be --distributed,",
    "extra": "unexpected argument 'extra'",
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys, bad):
    workdir = tmp_path / "run"
    line = ["scripts/train.py", "--config=sticky", f"--workdir={workdir}", *bad.split()]
    assert run(COMMAND, line) == 2
    printed, error = capsys.readouterr()
    assert len(error.splitlines()) == 1, error
    assert error.startswith("train.py: ")
    assert BAD[bad] in error
    assert len(error) < 250
    assert printed == ""
    assert not workdir.exists()


@pytest.mark.slow
def test_bad_input_is_exit_code_2_of_the_real_command():
    done = train_apart("--config=sticky", "--config.seeds=0")
    assert done.returncode == 2
    assert done.stderr == ("train.py: seeds=0: must be an integer from 1 to 1000000\n")


def test_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = train(*SMALL, f"--workdir={tmp_path / 'file' / 'run'}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "cannot be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_second_run_in_a_workdir_stops(tmp_path):
    with begin(
        *SMALL, "--config.steps=1e5", f"--workdir={tmp_path}", stdout=subprocess.PIPE
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
    assert "diverged in 2 of 2 seeds, the first at step 1" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_no_config_is_an_error(capsys):
    assert run(COMMAND, ["scripts/train.py"]) == 2
    assert "config: not given" in capsys.readouterr().err


def test_finished_run_is_not_overwritten_by_another_config(tmp_path):
    assert train(*SMALL, f"--workdir={tmp_path}").returncode == 0
    before = (tmp_path / "summary.json").read_bytes()
    done = train(*SMALL, f"--workdir={tmp_path}", "--config.steps=30")
    assert done.returncode == 2
    assert "differs in steps" in done.stderr
    assert (tmp_path / "summary.json").read_bytes() == before


LOOKED_AT = ("--config.diagnostics_length=20", "--config.snapshot_seeds=0")
LONG = (*SMALL, "--config.seeds=3", "--config.steps=600", "--checkpoint_seconds=0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that nothing stops ends with."""
    workdir = tmp_path_factory.mktemp("whole")
    assert train(*LONG, f"--workdir={workdir}").returncode == 0
    return (workdir / "metrics.npz").read_bytes()


def wait_for(process, folder, pattern):
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_stopped_run_says_how_to_go_on_and_does(tmp_path, whole, stop):
    with begin(*LONG, f"--workdir={tmp_path}", stderr=subprocess.PIPE) as process:
        wait_for(process, tmp_path, "checkpoints/*.msgpack")
        process.send_signal(stop)
        last = [line for line in process.stderr.read().splitlines() if line]
    assert process.returncode == 130
    assert not (tmp_path / "summary.json").exists()
    assert last[-3] == "stopping at the next evaluation; again to stop now"
    assert last[-2].startswith("stopped with 0 of 3 seeds done; seed 0 on, step ")
    assert last[-1].startswith("python scripts/train.py --config=configs/sticky.py")
    again = subprocess.run(
        [sys.executable, *shlex.split(last[-1])[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "going on from 0 of 3 seeds done; seed 0 on, step " in again.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert (tmp_path / "metrics.npz").read_bytes() == whole


def stop_when(process, stream, text, signal_=signal.SIGINT):
    """Sends Ctrl-C when a text comes; returns what it then says on stderr."""
    while text not in stream.readline():
        assert process.poll() is None
    process.send_signal(signal_)
    return process.stderr.read()


def test_stopped_while_compiling_it_ends_and_leaves_nothing(tmp_path):
    workdir = tmp_path / "run"
    arguments = (*SMALL, "--nocache", f"--workdir={workdir}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with begin(*arguments, **pipes) as process:
        said = stop_when(process, process.stdout, "compiling ...")
    assert process.returncode == 130
    *_, what, again = said.splitlines()
    assert what == f"stopped while compiling; {workdir} is as it was; begin again with:"
    assert again == shlex.join(["python", "scripts/train.py", *arguments])
    assert not workdir.exists()


def test_stopped_while_drawing_it_has_all_numbers_and_says_what_draws(tmp_path):
    arguments = (*SMALL, "--figures", "--html", f"--workdir={tmp_path}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with begin(*arguments, **pipes) as process:
        said = stop_when(process, process.stdout, "drawing figures ...")
    assert process.returncode == 130
    assert said.splitlines()[-2:] == [
        f"stopped while drawing; all numbers are in {tmp_path}; draw them with:",
        f"python scripts/figures.py {tmp_path} --html",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert runs.load(tmp_path).attrs["summary"]["complete"] is True


@pytest.mark.slow
def test_killed_at_random_moments_a_run_ends_with_the_same_numbers(tmp_path, whole):
    """Three times, also while it writes; each time with another number of workers."""
    moments = np.random.default_rng(0).uniform(0, 1.0, size=3)
    for workers, moment in enumerate(moments, start=1):
        with begin(
            *LONG,
            f"--workdir={tmp_path}",
            f"--workers={workers}",
            stdout=subprocess.PIPE,
        ) as process:
            while "compiling" not in process.stdout.readline():
                assert process.poll() is None
            wait_for(process, tmp_path, "checkpoints/*.msgpack")
            time.sleep(moment)
            process.kill()
        if (tmp_path / "summary.json").exists():
            break
    done = train(*LONG, f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert (tmp_path / "metrics.npz").read_bytes() == whole


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    tmp_path, whole
):
    """Files may be no longer than a little more than the first checkpoint."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    become = f"import os, resource, sys; {limit}; os.execv(sys.argv[1], sys.argv[1:])"
    arguments = (*LONG, f"--workdir={tmp_path / 'run'}", "--nocache")
    done = subprocess.run(
        [sys.executable, "-c", become, *command(*arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "caches")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not list(tmp_path.glob("caches/*"))
    assert done.returncode == 2, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("train.py: workdir=")
    assert "/run': cannot be written (File too large); make room" in error
    assert not list(tmp_path.glob("run/**/.*"))  # nothing half-written
    done = train(*LONG, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.npz").read_bytes() == whole


@pytest.mark.slow
def test_a_damaged_checkpoint_stops_before_compiling(tmp_path):
    with begin(*LONG, f"--workdir={tmp_path}") as process:
        wait_for(process, tmp_path, "checkpoints/*.msgpack")
        process.kill()
    path = max(tmp_path.glob("checkpoints/*.msgpack"), key=lambda p: int(p.stem))
    path.write_bytes(path.read_bytes()[:-1])
    done = train(*LONG, f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert "compiling" not in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "damaged (its checksum is wrong); use another" in done.stderr
    assert f"or remove {path}" in done.stderr


@pytest.mark.slow
def test_programs_are_kept_for_the_next_run(tmp_path):
    few = (*SMALL, "--config.seeds=1", "--config.steps=5", f"--workdir={tmp_path}/run")
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_LOGGING_LEVEL": "DEBUG",
    }
    del environment["JAX_COMPILATION_CACHE_DIR"]
    first, second = (train_apart(*few, environment=environment) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    missed, found = "CACHE MISS for 'jit_on_device'", "cache hit for 'jit_on_device'"
    assert first.stderr.count(missed) == 3  # draws, trains, evaluates
    assert second.stderr.count(missed) == 0
    assert second.stderr.count(found) == 3
    assert list((tmp_path / "jaxattn").glob("*-cache"))


def test_a_folder_that_cannot_keep_programs_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "kept"))
    before = jax.config.jax_compilation_cache_dir
    keep_programs(True)
    assert "file/kept: no programs kept (Not a directory)" in capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir == before
    assert not jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)


def test_more_memory_than_there_is_stops_before_compiling(tmp_path):
    done = train(*SMALL, f"--workdir={tmp_path / 'run'}", "--memory_share=1e-9")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "memory_share=1e-09: 1 of 2 seeds of" in done.stderr
    assert not (tmp_path / "run").exists()
