"""A run in the middle, kept and taken up again."""

import errno
import json
import math
import os

import jax
import numpy as np
import pytest
from engines import build, small_config

from jaxattn import engine, runs
from jaxattn.engine import rounds, training
from jaxattn.fields import ConfigError
from jaxattn.runs import checkpoints, directory


def claim(workdir, record):
    with directory.claimed(workdir, record):
        pass


@pytest.fixture(scope="module")
def program():
    return build(small_config(seeds=3, run_arms=("values_fast",)), workers=2)


def names(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def save(workdir, program, carry, seconds=12.5):
    training.keep(
        program, training.recorded(program.experiment), workdir, carry, seconds
    )


def assert_alike(program, restored, carry):
    """In all but the problems, which are drawn anew."""
    both = [rounds.collect(program, c) for c in (restored, carry)]
    jax.tree.map(np.testing.assert_array_equal, *both)
    assert jax.tree.structure(both[0]) == jax.tree.structure(both[1])


def test_checkpoint_comes_back_as_it_was(tmp_path, program):
    assert checkpoints.read(tmp_path) == b""
    assert training.resumed(program, b"") == (rounds.start(), 0.0)
    carry = rounds.start()
    for _ in range(3):
        carry = rounds.advance(program, carry)
        save(tmp_path, program, carry)
    save(tmp_path, program, carry)
    # 2 seeds after 5 and 10 steps.
    assert names(tmp_path) == ["10.msgpack", "20.msgpack", "config.json"]
    restored, seconds = training.resumed(program, checkpoints.read(tmp_path))
    assert seconds == 12.5
    assert_alike(program, restored, carry)


def test_checkpoint_of_a_run_with_finished_seeds(tmp_path, program):
    carry = rounds.start()
    while not carry.done:
        carry = rounds.advance(program, carry)
    save(tmp_path, program, carry)
    restored, _ = training.resumed(program, checkpoints.read(tmp_path))
    assert_alike(program, restored, carry)


def test_checkpoint_of_another_config_code_or_version_is_refused(tmp_path, program):
    record = training.recorded(program.experiment)
    save(tmp_path, program, rounds.advance(program, rounds.start()))
    claim(tmp_path, record)
    before = names(tmp_path)
    other = record | {"config": record["config"] | {"steps": 99}}
    with pytest.raises(
        runs.RunError, match=r"unfinished .*\(differs in config.steps\)"
    ):
        claim(tmp_path, other)
    described = tmp_path / "checkpoints" / "config.json"
    kept = json.loads(described.read_text())
    for change, refused in (
        ({"code": "0" * 16}, "code"),
        ({"versions": kept["versions"] | {"jax": "9.0"}}, "versions.jax"),
        ({"versions": kept["versions"] | {"python": "2.7"}}, "versions.python"),
        ({"device": kept["device"] | {"kind": "TPU"}}, "device.kind"),
        ({"device": kept["device"] | {"count": 99}, "processes": 8}, None),
        ({"git_commit": "of another README"}, None),
    ):
        described.write_text(json.dumps(kept | change))
        if refused is None:
            claim(tmp_path, record)
        else:
            with pytest.raises(runs.RunError, match=rf"\(differs in {refused}\)"):
                claim(tmp_path, record)
    assert names(tmp_path) == before


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "gone"])
def test_damaged_checkpoint_is_an_error_that_says_what_to_do(tmp_path, program, damage):
    save(tmp_path, program, rounds.advance(program, rounds.start()))
    (path,) = (tmp_path / "checkpoints").glob("*.msgpack")
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
        path.mkdir()
    else:
        content[len(content) // 2] ^= 1
        size = {"cut": len(content) - 1, "empty": 0, "flipped": len(content)}[damage]
        path.write_bytes(content[:size])
    with pytest.raises(runs.RunError) as error:
        checkpoints.read(tmp_path)
    assert "its checkpoint is damaged" in str(error.value)
    assert f"or remove {path}, to go on from the one" in str(error.value)
    assert path.exists()


def test_the_checkpoint_before_a_damaged_one_is_there(tmp_path, program):
    carry = rounds.advance(program, rounds.start())
    save(tmp_path, program, carry)
    save(tmp_path, program, rounds.advance(program, carry))
    (tmp_path / "checkpoints" / "10.msgpack").unlink()
    restored, _ = training.resumed(program, checkpoints.read(tmp_path))
    assert_alike(program, restored, carry)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, program, monkeypatch):
    carry = rounds.advance(program, rounds.start())
    save(tmp_path, program, carry)
    before = names(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(runs.RunError, match=r"\(No space left on device\); make room"):
        save(tmp_path, program, rounds.advance(program, carry))
    assert names(tmp_path) == before
    restored, _ = training.resumed(program, checkpoints.read(tmp_path))
    assert_alike(program, restored, carry)


@pytest.mark.parametrize("seconds", [math.nan, -1.0])
def test_checkpoints_must_come_due(tmp_path, seconds):
    settings = engine.Settings(checkpoint_seconds=seconds)
    with pytest.raises(ConfigError, match=r"^checkpoint_seconds=.* inf for"):
        engine.train(small_config(), workdir=tmp_path, settings=settings)
