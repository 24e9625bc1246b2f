"""Several processes that share a run, through `jax.distributed`; or one alone.

Every process calls these functions at the same point. In one process they cost nothing.
"""

import collections
import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

# Seconds until a process that is silent counts as dead, and the others are stopped.
HEARTBEAT_SECONDS = 30
# Seconds that processes wait for each other at the start.
START_SECONDS = 120
_PIECE = 2**28  # bytes that are handed out at once


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
      ProcessError: the environment does not say, the others did not come, or they have
        other numbers of devices.
    """
    # Its handler would keep SIGTERM from us.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            # SLURM would name one device for a process, also for one started by hand.
            cluster_detection_method="deactivate" if coordinator else None,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:  # JAX's own are RuntimeErrors
        raise ProcessError(
            f"cannot join the other processes ({str(error).splitlines()[0]})"
        ) from None
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ProcessError(
            f"devices of the processes={sorted(counts.values())}: must be as many each"
        )


def neighbours() -> int:
    """How many of the processes are on this machine, this one too.

    Raises:
      ProcessLostError: a process is gone.
    """
    return int(_have(socket.gethostname()).sum())


def leads() -> bool:
    """Whether this is process 0, which alone prints and writes."""
    return jax.process_index() == 0


def gather(tree):
    """Arrays of all processes, one after the other along the first axis, for each.

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
    if not _have(content).all():
        raise ProcessError(f"not all processes have the same {what}")


def hand_out(content: bytes) -> bytes:
    """Process 0's bytes, in every process.

    Raises:
      ProcessLostError: a process is gone.
    """
    if jax.process_count() == 1:
        return content
    with _together():
        size = np.frombuffer(len(content).to_bytes(8, "big"), np.uint8)
        size = np.asarray(multihost_utils.broadcast_one_to_all(size))
        size, pieces = int.from_bytes(size.tobytes(), "big"), []
        for first in range(0, size, _PIECE):
            piece = np.zeros(min(_PIECE, size - first), np.uint8)
            if leads():
                piece[:] = np.frombuffer(content[first : first + _PIECE], np.uint8)
            pieces.append(np.asarray(multihost_utils.broadcast_one_to_all(piece)))
    return b"".join(piece.tobytes() for piece in pieces)


def led(function: Callable):
    """Calls a function in process 0 alone; where that fails, every process does.

    Args:
      function: of nothing.

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
        except Exception as error:  # raised below, when the others know
            failure = error
    if any(any_of(failure is not None)):
        raise failure or ProcessError("process 0 stopped; it says why")
    return result


def _have(text: str) -> np.ndarray:
    """Which processes give the same text as this one."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    return (gather(digest[None]) == digest).all(axis=1)


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # jit's, of the same
        raise ProcessLostError(
            f"lost another process ({str(error).splitlines()[0]})"
        ) from None
