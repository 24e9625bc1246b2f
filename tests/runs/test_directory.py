"""The run directory: claimed, and written at once."""

import copy
import errno
import os
from pathlib import Path

import pytest

from jaxattn import experiments, runs
from jaxattn.engine import training
from jaxattn.runs import checkpoints, directory, staging, write


@pytest.fixture
def record():
    config = experiments.load("configs/sticky.py:smoke").config
    return training.recorded(experiments.resolve(config))


def test_staged_moves_everything_or_nothing(tmp_path):
    (tmp_path / "kept").write_text("old")
    with directory.staged(tmp_path) as stage:
        (stage / "figures").mkdir()
        (stage / "figures" / "a").write_text("a")
        (stage / "kept").write_text("new")
        assert (tmp_path / "kept").read_text() == "old"
    assert (tmp_path / "kept").read_text() == "new"
    assert (tmp_path / "figures" / "a").read_text() == "a"

    def fail():
        with directory.staged(tmp_path) as stage:
            (stage / "kept").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "kept").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "kept"]


def tree(folder):
    """Name -> content of all that is in a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in found}


@pytest.mark.parametrize("killed", [False, True])
def test_what_cannot_be_moved_in_leaves_the_run_before(tmp_path, monkeypatch, killed):
    """Whichever step fails; and a summary never stands beside files of another run."""
    names = ("summary.json", "metrics.npz", "figures/a.png", "report.md", "a/b/c")
    gone = ("figures/old.png", "weights.msgpack")
    old = dict.fromkeys((*names[:4], *gone), "old") | {"figures/mine.txt": "mine"}
    new = dict.fromkeys(names, "new") | {"figures/mine.txt": "mine"}
    replace, put_back = os.replace, staging.put_back

    def move(workdir, failing):
        """Returns at which step a run was moved in, if it was."""
        steps = []

        def step(*paths):
            if (workdir / "summary.json").exists():
                seen = {n: t for n, t in tree(workdir).items() if ".writing" not in n}
                assert seen in (old, new)
            steps.append(paths)
            if len(steps) == failing:
                raise OSError(errno.EIO, "Input/output error")
            replace(*paths)

        for name, text in old.items():
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", step)
            if killed:
                patch.setattr(staging, "put_back", lambda *_: None)
            else:  # undone with what works again
                patch.setattr(
                    staging,
                    "put_back",
                    lambda *a: (patch.setattr(os, "replace", replace), put_back(*a)),
                )
            with directory.staged(workdir, instead_of=[*gone, "none.png"]) as stage:
                for name in names:
                    (stage / name).parent.mkdir(parents=True, exist_ok=True)
                    (stage / name).write_text("new")
        return len(steps)

    count = move(tmp_path / "all", 0)
    for failing in range(1, count + 1):
        workdir = tmp_path / str(failing)
        with pytest.raises(runs.RunError, match="Input/output error"):
            move(workdir, failing)
        if killed:
            with directory.claimed(workdir, None):
                pass
        assert tree(workdir) == old
    with directory.claimed(tmp_path / "all", None):
        pass
    assert tree(tmp_path / "all") == new
    assert not list(tmp_path.rglob(".writing*"))


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("config.json", "a file"),
        ("summary.json", "a file"),
        ("report.md", "a file"),
        ("report.txt", "a file"),
        ("weights.msgpack", "a file"),
        ("figures/curves.png", "a file"),
        ("checkpoints/config.json", "a file"),
        ("checkpoints/10.msgpack", "a file"),
        ("figures", "a folder"),
        ("checkpoints", "a folder"),
    ],
)
def test_claim_refuses_what_is_in_the_way(tmp_path, record, name, needs):
    """Else a run would fail when it is finished."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if needs == "a file":
        path.mkdir()
    else:
        path.write_text("mine")
    with pytest.raises(runs.RunError) as error:
        claim(tmp_path, record)
    said = f"{path} is in the way; must be {needs}, or nothing; move"
    assert said in str(error.value)
    assert path.exists()


def test_claim_refuses_a_summary_that_is_none(tmp_path, record):
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(runs.RunError, match=r"its summary\.json is not of a run"):
        claim(tmp_path, record)


def test_what_a_user_put_into_a_run_directory_stays(tmp_path, record):
    mine = (".writing-notes", ".writing-abc/d", "checkpoints/foo.msgpack", "a/.1.new")
    for name in (*mine, "checkpoints/10.msgpack", "checkpoints/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "checkpoints" / "config.json").unlink()
    claim(tmp_path, record)
    assert (tmp_path / "checkpoints" / "10.msgpack").exists()
    checkpoints.remove(tmp_path)
    assert tree(tmp_path) == dict.fromkeys(mine, "{}")


def claim(workdir, record):
    with directory.claimed(workdir, record):
        pass


def test_claim_refuses_another_config(tmp_path, record):
    with directory.claimed(tmp_path, record), directory.staged(tmp_path) as stage:
        write.write_record(stage, record)
    claim(tmp_path, record)
    other = copy.deepcopy(record)
    other["config"]["arms"]["values_fast"]["value_rate"] = 0.2
    with pytest.raises(runs.RunError, match=r"differs in arms.values_fast.value_rate"):
        claim(tmp_path, other)


def test_claim_leaves_no_folder_of_its_own(tmp_path, record):
    claim(tmp_path / "a" / "b", record)
    assert list(tmp_path.iterdir()) == []


def test_claim_refuses_a_folder_that_cannot_be_written(tmp_path, record, monkeypatch):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run", "x" * 300):
        with pytest.raises(runs.RunError, match="cannot be written"):
            claim(tmp_path / name, record)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(runs.RunError, match=r"cannot be written \(Permission denied"):
        claim(tmp_path / "run", record)


def test_claim_refuses_a_folder_where_a_run_is_at_work(tmp_path, record):
    with (
        directory.claimed(tmp_path, record),
        pytest.raises(runs.RunError, match="another run is at work"),
    ):
        claim(tmp_path, record)
    claim(tmp_path, record)


def test_claim_refuses_what_it_cannot_read(tmp_path, record):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(runs.RunError, match=r"its config.json is not of a run"):
        claim(tmp_path, record)


def test_claim_clears_away_what_a_killed_run_was_writing(tmp_path, record):
    (tmp_path / ".writing-abc_1234").mkdir()
    (tmp_path / ".writing-abc_1234" / "metrics.npz").write_text("half")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".20.msgpack.new").write_text("half")
    claim(tmp_path, record)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


def test_a_full_disk_leaves_the_run_before(tmp_path):
    (tmp_path / "summary.json").write_text("old")

    def fill():
        with directory.staged(tmp_path) as stage:
            (stage / "summary.json").write_text("new")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(runs.RunError, match="No space left on device"):
        fill()
    assert (tmp_path / "summary.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
