"""Several processes that share a run, through `jax.distributed`; or one alone.

Every process calls these functions at the same point. In one process they cost nothing.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

# Seconds until a process that is silent counts as dead, and the others are stopped.
HEARTBEAT_SECONDS = 30
# Seconds that processes wait for each other at the start.
START_SECONDS = 120


class ProcessError(RuntimeError):
    """The processes cannot go on together, and all know it."""


class ProcessLostError(ProcessError):
    """Another process is gone: there is no use in waiting for it."""


def join(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Makes this process one of several; to be called before anything of JAX's.

    Args:
      coordinator: "host:port" of process 0; None with the others None too: what the
        cluster's environment says, as far as JAX knows it (SLURM, Open MPI, GKE, ...).
      count: of processes.
      index: of this one.

    Raises:
      ProcessError: the environment does not say, or the others did not come.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:  # JAX's own are RuntimeErrors
        raise ProcessError(
            f"cannot join the other processes ({str(error).splitlines()[0]})"
        ) from None


def leads() -> bool:
    """Whether this is process 0, which alone prints and writes."""
    return jax.process_index() == 0


def gather(tree):
    """Arrays of all processes, one behind the other along the first axis, for each.

    Args:
      tree: arrays, of the same shapes in every process.

    Returns:
      The same with numpy arrays, (processes x n, ...), to the last bit.

    Raises:
      ProcessLostError: a process is gone.
    """
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    with _together():
        return multihost_utils.process_allgather(tree, tiled=True)


def any_of(*flags: bool) -> list[bool]:
    """Whether each of some flags is up in any process.

    Raises:
      ProcessLostError: a process is gone.
    """
    return gather(np.array([flags])).any(axis=0).tolist()


def require_same(what: str, content: str) -> None:
    """Raises ProcessError where not all processes have the same text.

    Args:
      what: it is, for the message.
      content: to compare.
    """
    digest = np.frombuffer(hashlib.sha256(content.encode()).digest(), np.uint8)
    if (gather(digest[None]) != digest).any():
        raise ProcessError(f"not all processes have the same {what}")


def hand_out(content: bytes) -> bytes:
    """Process 0's bytes, in every process.

    Raises:
      ProcessLostError: a process is gone.
    """
    if jax.process_count() == 1:
        return content
    with _together():
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
        mine = np.frombuffer(content, np.uint8) if leads() else np.zeros(size, np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(mine)).tobytes()


def led(function: Callable, *errors: type[Exception]):
    """Calls a function in process 0 alone; where that fails, every process does.

    Args:
      function: of nothing.
      errors: which of its errors the others are to hear of.

    Returns:
      What it gives, in process 0; None elsewhere.

    Raises:
      ProcessError: the function failed in process 0, which raises its own error; or a
        process is gone.
    """
    result = failure = None
    if leads():
        try:
            result = function()
        except errors as error:
            failure = error
    if any(any_of(failure is not None)):
        raise failure or ProcessError("process 0 stopped; it says why")
    return result


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # jit's, of the same
        raise ProcessLostError(
            f"lost another process ({str(error).splitlines()[0]})"
        ) from None
