"""Run directories: written by the engine, read as labelled arrays."""

from typing import Any

from jaxattn.runs.json_files import RunError
from jaxattn.runs.read import Run, load, load_finished

__all__ = ["Run", "RunError", "load", "load_finished", "load_weights"]


def load_weights(path: Any, arm: str, seed: int) -> Any:
    """Reads what an arm ended with on a seed, see `weights.load_weights`."""
    # Late: reading numbers does not need flax.
    from jaxattn.runs import weights

    return weights.load_weights(path, arm, seed)
