"""Every test: no silent promotion of rank or dtype, warnings are errors."""

import gc
import os
from pathlib import Path
from typing import NamedTuple

from compiling import QUICK

# Before JAX starts: a test spends its time compiling, not running. CI runs the laws and
# attention on another Python without these flags.
_FLAGS = (f"--{name}={str(value).lower()}" for name, value in QUICK.items())
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# JAX's traces are many small objects that live on.
gc.set_threshold(100_000, 50, 100)

import hypothesis
import jax
import numpy as np
import pytest

from jaxattn.tasks.base import Batch
from jaxattn.theory.attention import Params

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 4)  # for meshes; all else is on one

# The same examples every time, and no limit on a compiling machine's time. To look for
# new ones: pytest --hypothesis-profile=search.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory, request):
    """Programs that several tests, or commands that they start, compile alike.

    One folder for all workers of pytest-xdist; or JAX_COMPILATION_CACHE_DIR, for
    several runs of the tests.
    """
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    name = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    jax.config.update("jax_compilation_cache_dir", name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


class Reference(NamedTuple):
    """One run of the authors' script."""

    params: Params
    batch: Batch
    losses: dict[str, np.ndarray]  # "sgd", "em" -> (1000,)
    final: dict[str, np.ndarray]  # "sgd", "em" -> loss, entropy, accuracy


@pytest.fixture(scope="session")
def references() -> dict[str, Reference]:
    with np.load(Path(__file__).parent / "data" / "sticky_reference.npz") as file:
        arrays = dict(file)
    seeds = sorted({name.split("/")[0] for name in arrays})
    return {
        seed: Reference(
            Params(*(arrays[f"{seed}/w_{role}"] for role in "qkvo")),
            Batch(arrays[f"{seed}/x"], arrays[f"{seed}/y"]),
            {arm: arrays[f"{seed}/loss_{arm}"] for arm in ("sgd", "em")},
            {arm: arrays[f"{seed}/final_{arm}"] for arm in ("sgd", "em")},
        )
        for seed in seeds
    }


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
