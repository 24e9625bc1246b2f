"""Files written beside a run directory first, and then moved in at once."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxattn.runs.json_files import RunError, as_json, read_json


@contextlib.contextmanager
def staged(workdir: Path, *, instead_of: Iterable[str] = ()) -> Iterator[Path]:
    """A folder to write a finished run into; moved into `workdir` if all went well.

    Args:
      workdir: claimed.
      instead_of: names of files in it, of an earlier run or drawing, that go if they
        are not written anew.

    Yields:
      An empty folder. Its files replace their namesakes, one after another; meanwhile
      there is no summary.json, which says that the run is whole, and comes last.

    Raises:
      RunError: it cannot be written or moved in; what was there is as it was. After a
        kill in the middle, `claimed` puts it back.
    """
    with writing(workdir):
        folder = Path(tempfile.mkdtemp(prefix=".writing-", dir=workdir))
        stage = folder / "new"
        try:
            stage.mkdir()
            yield stage
            _move_in(workdir, folder, instead_of)
        finally:
            put_back(workdir, folder)


def _move_in(workdir: Path, folder: Path, instead_of: Iterable[str]) -> None:
    """Moves in what is in new/; what that replaces lies in old/ until all is in.

    Args:
      workdir: to move into.
      folder: of `staged`, in it. Its names.json says what is moved in.
      instead_of: see `staged`.
    """
    new, old = folder / "new", folder / "old"
    names = sorted(_files(new), key=lambda name: (name == "summary.json", name))
    going = dict.fromkeys(["summary.json", *names, *instead_of])
    going = [n for n in going if os.path.lexists(workdir / n)]
    for name in going:
        if (workdir / name).is_dir():
            raise in_the_way(workdir, name, "a file, or nothing")
    replace(folder / "names.json", as_json(names).encode())
    old.mkdir()
    for path in (*(old / n for n in going), *(workdir / n for n in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
    for name in going:
        os.replace(workdir / name, old / name)
    for name in names:
        os.replace(new / name, workdir / name)
    os.replace(old, folder / "replaced")  # from here there is nothing to put back


def put_back(workdir: Path, folder: Path) -> None:
    """Undoes a `_move_in` that did not come to its end, and removes its folder.

    Each file is moved back, so that this may itself be broken off and done again.
    """
    new, old = folder / "new", folder / "old"
    if old.is_dir():
        for name in read_json(folder / "names.json", [(str,)]):
            if not (new / name).exists() and (workdir / name).exists():
                os.replace(workdir / name, new / name)
        for name in sorted(_files(old), key=lambda name: name == "summary.json"):
            os.replace(old / name, workdir / name)
        os.replace(old, folder / "replaced")
    # Whoever was left behind may still write here: the next claim removes what stays.
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    """Names of all files in it, however deep."""
    found = folder.rglob("*")
    return [str(p.relative_to(folder)) for p in found if p.is_symlink() or p.is_file()]


def in_the_way(workdir: Path, name: str, must: str) -> RunError:
    """Blames what stands where a file of a run goes."""
    return RunError(
        f"workdir={str(workdir)!r}: {workdir / name} is in the way; must be {must};"
        " move it, or give another --workdir"
    )


def remove_empty(folders: list[Path]) -> None:
    """Removes the innermost first, as far as nothing lies in them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def writing(workdir: Path) -> Iterator[None]:
    """Blames the directory for what cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"workdir={str(workdir)!r}: cannot be written ({error.strerror or error});"
            " make room, and the same command goes on from what was there"
        ) from None


def replace(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole, or not at all."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
