"""Checkpoints of a run in the middle: its newest two, each with a checksum."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from jaxattn.runs.directory import CHECKPOINT, NEW, matching
from jaxattn.runs.json_files import RunError, as_json
from jaxattn.runs.staging import remove_empty, replace, writing

_DIGEST = hashlib.sha256


def save(workdir: Path, record: dict[str, Any], steps: int, content: bytes) -> None:
    """Keeps a run in the middle, and the one kept before, but none before that.

    Args:
      workdir: claimed.
      record: all that the numbers of the run depend on.
      steps: done so far.
      content: to keep.

    Raises:
      RunError: it cannot be written; the one kept before is still there.
    """
    folder = workdir / "checkpoints"
    with writing(workdir):
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            replace(folder / "config.json", as_json(record).encode())
        before = _newest_last(workdir)
        path = folder / f"{steps}.msgpack"
        replace(path, _DIGEST(content).digest() + content)
        for old in [old for old in before if old != path][:-1]:
            old.unlink()


def read(workdir: Path) -> bytes:
    """Reads the newest checkpoint; empty if there is none.

    Args:
      workdir: claimed.

    Raises:
      RunError: it is damaged, or cannot be read.
    """
    found = _newest_last(workdir)
    if not found:
        return b""
    path = found[-1]
    try:
        content = path.read_bytes()
        size = _DIGEST().digest_size
        whole = _DIGEST(content[size:]).digest() == content[:size]
        reason = "its checksum is wrong"
    except OSError as error:
        whole, reason = False, error.strerror
    if not whole:
        raise RunError(
            f"workdir={str(workdir)!r}: its checkpoint is damaged ({reason}); use"
            f" another --workdir, or remove {path}, to go on from the one before it"
            " or else from the start"
        )
    return content[size:]


def remove(workdir: Path) -> None:
    """Forgets a run in the middle, once it is finished."""
    folder = workdir / "checkpoints"
    left_over = [folder / "config.json", *matching(folder, NEW)]
    for path in (*_newest_last(workdir), *left_over):
        with contextlib.suppress(OSError):  # the run is whole without
            path.unlink()
    remove_empty([folder])


def _newest_last(workdir: Path) -> list[Path]:
    found = matching(workdir / "checkpoints", CHECKPOINT)
    return sorted(found, key=lambda path: int(path.stem))
