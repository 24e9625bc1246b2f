"""What arms ended with: weights.msgpack, written and read."""

from pathlib import Path
from typing import Any

import jax
from flax import serialization

from jaxattn.models import transformer
from jaxattn.runs.json_files import RunError
from jaxattn.runs.read import load

WEIGHTS = "weights.msgpack"


def write_weights(folder: Path, weights: Any) -> None:
    """Writes weights.msgpack.

    Args:
      folder: of a run.
      weights: arm -> what it ended with, lead with seed.
    """
    (folder / WEIGHTS).write_bytes(serialization.to_bytes(weights))


def load_weights(path: Path | str, arm: str, seed: int) -> transformer.Params:
    """Reads the parameters of an arm at the end, for `transformer.apply`.

    Args:
      path: of a run directory with weights.msgpack.
      arm: that ran.
      seed: its id.

    Raises:
      RunError: it is not there, or not of this arm's architecture; names what is
        missing, too much, or of another shape.
    """
    run, path = load(path), Path(path)
    for name, value in (("arm", arm), ("seed", seed)):
        there = run[name].values.tolist()
        if value not in there:
            raise RunError(
                f"{name}={value!r}: not in run {str(path)!r}; must be one of"
                f" {', '.join(map(str, there))}"
            )
    place = run["seed"].values.tolist().index(seed)
    try:
        found = serialization.msgpack_restore((path / WEIGHTS).read_bytes())[arm]
        own = jax.tree.map(lambda leaf: leaf[place], found)
        architecture = transformer.Architecture(
            **run.attrs["facts"]["architectures"][arm]
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"run={str(path)!r}: its {WEIGHTS} cannot be read ({error!r}); must be a"
            " run that was trained with --weights"
        ) from None
    try:
        return transformer.restored(architecture, own)
    except transformer.ParamsError as error:
        raise RunError(f"run={str(path)!r}, arm={arm!r}: {error}") from None
