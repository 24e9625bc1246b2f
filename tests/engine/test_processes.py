"""Two real processes on this machine, that share a run."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxattn.cli.command import run
from jaxattn.cli.train import COMMAND
from jaxattn.engine import processes

ROOT = Path(__file__).parents[2]
# Five seeds: in the last round one process has nothing of its own to do.
RUN = (
    "--config=configs/sticky.py:smoke",
    "--nofigures",
    "--config.run_arms=sgd",
    "--config.gradient=autodiff",  # of short sequences: compiles in less time
    "--config.task.length=60",
    "--config.seeds=5",
    "--config.snapshot_seeds=0,3",
)
LONG = (*RUN, "--config.steps=300")


def free_port():
    """In the range that JAX takes ports from for a SLURM job, which names them so."""
    while True:
        port = int(np.random.default_rng().integers(65535 - 2**12 + 1, 65536))
        with socket.socket() as free:
            if free.connect_ex(("localhost", port)) != 0:
                return port


def by_flags(port, index):
    where = f"--coordinator=localhost:{port}", "--processes=2"
    return (*where, f"--process={index}"), {}


def by_slurm(port, index):
    named = {"JOB_ID": port, "NTASKS": 2, "PROCID": index, "LOCALID": index}
    named |= {"STEP_NODELIST": "localhost", "STEP_NUM_TASKS": 2}
    return ("--distributed",), {f"SLURM_{n}": str(value) for n, value in named.items()}


@pytest.fixture
def start():
    """Starts the two processes of a run, each with arguments of its own too."""
    every = []

    def begin(*arguments, own=((), ()), slurm=False):
        port, started = free_port(), []
        for index, of_this in enumerate(own):
            where = by_slurm(port, index) if slurm else by_flags(port, index)
            flags, environment = where
            started.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "scripts/train.py", "--workers=1"),
                        *(*flags, *arguments, *of_this),
                    ],
                    cwd=ROOT,
                    env=os.environ | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        every.extend(started)
        return started

    yield begin
    for process in every:
        process.kill()
        process.communicate()


def end(started, seconds=100):
    """Waits; returns exit codes, what was printed, and what went wrong."""
    said = [process.communicate(timeout=seconds) for process in started]
    codes = [process.returncode for process in started]
    return codes, *zip(*said, strict=True)


def alone(workdir, *arguments):
    command = [sys.executable, "scripts/train.py", *arguments, f"--workdir={workdir}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (workdir / "metrics.npz").read_bytes(), done.stdout


def wait_for_checkpoint(workdir, process):
    deadline = time.monotonic() + 60
    while not list(workdir.glob("checkpoints/*.msgpack")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return alone(tmp_path_factory.mktemp("whole"), *LONG)[0]


def test_two_processes_that_slurm_starts_give_the_numbers_of_one(tmp_path, start):
    line = ["scripts/train.py", *RUN, f"--workdir={tmp_path / 'one'}"]
    assert run(COMMAND, line) == 0
    expected = (tmp_path / "one" / "metrics.npz").read_bytes()
    codes, printed, errors = end(
        start(*RUN, f"--workdir={tmp_path / 'two'}", slurm=True)
    )
    assert codes == [0, 0], errors
    assert (tmp_path / "two" / "metrics.npz").read_bytes() == expected
    assert "2 processes: 2 seeds at once" in printed[0]
    assert "Written to" in printed[0]
    assert "seed-step" not in printed[1] + errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_dies_stops_the_other_and_the_run_goes_on(
    tmp_path, start, whole, lost
):
    started = start(*LONG, f"--workdir={tmp_path}", "--checkpoint_seconds=0")
    wait_for_checkpoint(tmp_path, started[0])
    started[lost].kill()
    died = time.monotonic()
    other = started[1 - lost]
    _, error = other.communicate(timeout=300)
    assert time.monotonic() - died < 1.5 * processes.HEARTBEAT_SECONDS
    assert other.returncode not in (0, 2)
    if lost == 0 and "train.py" not in error:
        # JAX ends a process whose coordinator is gone, and may be the first to.
        assert "another task died" in error
    else:
        assert "train.py: lost another process (" in error
        assert "the same command goes on from the last checkpoint" in error
    assert not (tmp_path / "summary.json").exists()
    codes, printed, errors = end(start(*LONG, f"--workdir={tmp_path}"))
    assert codes == [0, 0], errors
    assert "going on from" in printed[0]
    assert (tmp_path / "metrics.npz").read_bytes() == whole


@pytest.mark.slow
def test_stopping_one_process_stops_both_at_the_same_checkpoint(tmp_path, start, whole):
    started = start(*LONG, f"--workdir={tmp_path}", "--checkpoint_seconds=0")
    wait_for_checkpoint(tmp_path, started[0])
    started[1].send_signal(signal.SIGTERM)
    codes, _, errors = end(started)
    assert codes == [130, 130]
    assert "go on with:\nthe same commands, for every process" in errors[0]
    numbers, printed = alone(tmp_path, *LONG)
    assert "going on from" in printed
    assert numbers == whole


@pytest.mark.slow
def test_a_process_that_hangs_stops_the_other(tmp_path, start):
    started = start(*LONG, f"--workdir={tmp_path}", "--checkpoint_seconds=0")
    wait_for_checkpoint(tmp_path, started[0])
    started[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    _, error = started[0].communicate(timeout=200)
    assert time.monotonic() - began < 3 * processes.HEARTBEAT_SECONDS
    assert started[0].returncode not in (0, 2)
    assert "stopped sending heartbeats" in error


@pytest.mark.slow
def test_what_one_process_cannot_do_none_does(tmp_path, start):
    """Process 0 alone sees the directory; different configs are seen by both."""
    (tmp_path / "file").write_text("")
    codes, _, errors = end(start(*RUN, f"--workdir={tmp_path / 'file' / 'run'}"))
    assert codes == [2, 2]
    assert "cannot be written" in errors[0]
    assert "process 0 stopped; it says why" in errors[1]


@pytest.mark.slow
def test_processes_with_different_configs_stop(tmp_path, start):
    own = ("--config.seed=1",), ("--config.seed=2",)
    started = start(*RUN, f"--workdir={tmp_path}", own=own)
    codes, _, errors = end(started)
    assert codes == [2, 2]
    for error in errors:
        assert "not all processes have the same config, code and versions" in error


def test_without_a_cluster_there_are_no_others_to_join():
    command = [sys.executable, "scripts/train.py", *RUN, "--distributed"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("train.py: ")
    assert "cannot join the other processes (" in done.stderr


def test_alone_everything_is_at_hand():
    tree = {"a": np.arange(3), "b": np.array([np.nan, -0.0], np.float32)}
    for name, array in processes.gather(tree).items():
        np.testing.assert_array_equal(array, tree[name])
    assert processes.leads()
    assert processes.any_of(True, False) == [True, False]
    assert processes.hand_out(b"\x00\xff") == b"\x00\xff"
    assert processes.led(lambda: 3) == 3
    assert processes.neighbours() == 1
    with pytest.raises(ZeroDivisionError):
        processes.led(lambda: 1 / 0)
