"""The run directory: claimed before a run, and written at once.

A directory is either untouched, or holds `checkpoints/` of a run in the middle, or a
whole finished run: its files are written beside it first and then moved in, with
summary.json last. What cannot be moved in leaves the run that was there as it was.
Files that are not named here, or in summary.json as figures, are the user's: they are
never removed.
"""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxattn.runs.json_files import RunError, differing, misfit, read_json
from jaxattn.runs.staging import (
    in_the_way,
    put_back,
    remove_empty,
    staged,
    writing,
)

__all__ = ["claimed", "drawn", "require_ours", "staged"]

CHECKPOINT = re.compile(r"\d+\.msgpack")  # named by the steps done
# What is written, and where more of it is.
_FILES = (
    *("config.json", "metrics.json", "metrics.npz", "summary.json", "summary.csv"),
    *("report.md", "report.html", "report.txt", "weights.msgpack"),
    "checkpoints/config.json",
)
_FOLDERS = ("figures", "checkpoints")
_PICTURES = re.compile(r"[\w.-]+\.(png|gif|pdf)")
# What a killed run leaves: as `tempfile.mkdtemp` and `staging.replace` name it.
_WRITING = re.compile(r"\.writing-[a-z0-9_]{8}")
NEW = re.compile(r"\.(\d+\.msgpack|config\.json)\.new")
# What a run may be resumed with though it was begun with others.
_ANY = ("device.count", "device.cores", "processes", "git_commit")


@contextlib.contextmanager
def claimed(workdir: Path, record: dict[str, Any] | None) -> Iterator[None]:
    """Holds a directory for a run; made if it is not there.

    Args:
      workdir: the directory.
      record: all that its numbers depend on; None for the run that lies in it.

    Raises:
      RunError: it cannot be written, another run is at work in it, it holds a run of
        another config, or something else where files of a run go.
    """
    made = []
    try:
        made = [path for path in (workdir, *workdir.parents) if not path.exists()]
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
        handle = os.open(workdir, os.O_RDONLY)
    except OSError as error:
        remove_empty(made)
        raise RunError(
            f"workdir={str(workdir)!r}: cannot be written ({error.strerror});"
            " must be a folder that can"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            reason = "another run is at work in it" if busy else error.strerror
            raise RunError(
                f"workdir={str(workdir)!r}: cannot be locked ({reason}); use"
                " another --workdir, or wait"
            ) from None
        with writing(workdir):
            _require_places(workdir)
            for left_over in matching(workdir, _WRITING):
                if left_over.is_dir() and not left_over.is_symlink():
                    put_back(workdir, left_over)
            if record is not None:
                _require_same(workdir, record)
                drawn(workdir)  # or it says what is wrong
            for left_over in matching(workdir / "checkpoints", NEW):
                left_over.unlink()
        yield
    finally:
        os.close(handle)
        remove_empty(made)


def _require_places(workdir: Path) -> None:
    """Raises RunError where something is in the way of what a run will write."""
    names = [*_FILES]
    for folder in _FOLDERS:
        path = workdir / folder
        if os.path.lexists(path) and not path.is_dir():
            raise in_the_way(workdir, folder, "a folder, or nothing")
        if path.is_dir():
            with tempfile.TemporaryFile(dir=path):  # or the error says why not
                pass
    for folder, pattern in (("figures", _PICTURES), ("checkpoints", CHECKPOINT)):
        found = matching(workdir / folder, pattern)
        names += [f"{folder}/{path.name}" for path in found]
    for name in names:
        if (workdir / name).is_dir():
            raise in_the_way(workdir, name, "a file, or nothing")


def matching(folder: Path, pattern: re.Pattern) -> list[Path]:
    """What is in a folder, if there is one, and has a name of this pattern."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if pattern.fullmatch(path.name))


def _require_same(workdir: Path, record: dict[str, Any]) -> None:
    """Raises RunError where a directory holds a run that this one would not go on."""
    finished = workdir / "config.json"
    if finished.is_file():
        held = read_json(finished, {"config": {}})["config"]
        others = differing(held, record["config"])
        if others:
            raise RunError(
                f"workdir={str(workdir)!r}: holds a finished run of another config"
                f" (differs in {', '.join(others)}); use another --workdir, or"
                " remove this one first"
            )
    unfinished = workdir / "checkpoints" / "config.json"
    if unfinished.is_file():
        others = differing(read_json(unfinished, {}), record)
        others = [name for name in others if name not in _ANY]
        if others:
            raise RunError(
                f"workdir={str(workdir)!r}: holds an unfinished run of another config"
                f" or code (differs in {', '.join(others)}); use another"
                f" --workdir, or remove {workdir / 'checkpoints'} first"
            )


def drawn(workdir: Path) -> list[str] | None:
    """The figures that summary.json lists as drawn; what else is there is the user's.

    None for a run of before they were listed.

    Args:
      workdir: claimed.

    Raises:
      RunError: the list is damaged.
    """
    path = workdir / "summary.json"
    if not os.path.lexists(path):
        return []
    names = read_json(path, {}).get("figures")
    wrong = names is not None and misfit(names, [(str,)], "figures")
    if not wrong and names and not all(map(_PICTURES.fullmatch, names)):
        wrong = "figures has other names than of pictures"
    if wrong:
        raise RunError(
            f"workdir={str(workdir)!r}: its summary.json is not of a run ({wrong});"
            " remove the list from it"
        )
    return names


def require_ours(workdir: Path, stage: Path, ours: list[str] | None) -> list[str]:
    """The figures in a stage, none of which may take the place of a user's file.

    Args:
      workdir: claimed.
      stage: from `staged`.
      ours: from `drawn`.

    Raises:
      RunError: one would.
    """
    new = [path.name for path in matching(stage / "figures", _PICTURES)]
    for name in new:
        path = workdir / "figures" / name
        if ours is not None and name not in ours and os.path.lexists(path):
            raise RunError(
                f"workdir={str(workdir)!r}: {path} is not one that was drawn here, and"
                " is not replaced; move it, and draw with"
                " scripts/figures.py"
            )
    return new
