"""What a run's numbers depend on beside its config: versions, device, code."""

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxattn

_PACKAGES = ("jax", "jaxlib", "optax", "flax", "chex", "numpy")


def provenance() -> dict[str, Any]:
    """Describes versions, device, processes, code and generator, plain."""
    devices = jax.devices()
    return {
        "versions": {
            "python": platform.python_version(),
            "jaxattn": jaxattn.__version__,
        }
        | {name: metadata.version(name) for name in _PACKAGES},
        "device": {
            "kind": devices[0].device_kind,
            "count": len(devices),
            "cores": os.cpu_count(),
        },
        "processes": jax.process_count(),
        "code": _code(),
        "git_commit": _git_commit(),
        "prng_implementation": str(jax.config.jax_default_prng_impl),
    }


def _code() -> str:
    """A digest of this package's source."""
    digest = hashlib.sha256()
    folder = Path(jaxattn.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _git_commit() -> str:
    """The commit of the code, with "+changes" if edited; "unknown" outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(jaxattn.__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".", ":/configs", ":/scripts")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
