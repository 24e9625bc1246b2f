"""What a program needs, and what there is."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.engine import memory

MATRIX = jax.ShapeDtypeStruct((100, 100), np.float32)


def test_a_program_needs_its_results_and_what_it_works_on():
    program = jax.jit(lambda x: (jnp.sin(x) @ jnp.cos(x)) @ x).lower(MATRIX).compile()
    assert 2 * 40_000 <= memory.of_program(program) <= 5 * 40_000


def test_the_size_of_a_tree():
    assert memory.size({"a": MATRIX, "b": [np.zeros(3, np.int8), ()]}) == 40_003


def test_a_job_has_what_its_groups_are_allowed(tmp_path, monkeypatch):
    """Of both generations of groups, an outer one too."""
    device, groups = jax.devices()[0], tmp_path / "groups"
    machine = memory.of_device(device)
    assert 2**28 < machine < 2**50
    limits = ("", tmp_path, "memory.max"), ("memory", tmp_path / "m", "limit")
    monkeypatch.setattr(memory, "_LIMITS", limits)
    monkeypatch.setattr(memory, "_GROUPS", groups)
    whole = memory.of_device(device)
    assert whole >= machine
    for folder in ("job/step", "m/job"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "job" / "step" / "memory.max").write_text("max\n")
    (tmp_path / "job" / "memory.max").write_text(f"{2**21}\n")
    (tmp_path / "m" / "job" / "limit").write_text(f"{2**20}\n")
    for text, expected in (
        ("0::/job/step\n", 2**21),
        ("3:cpu:/job\n2:memory,x:/job\n", 2**20),
        ("0::/elsewhere\n", whole),
    ):
        groups.write_text(text)
        assert memory.of_device(device) == expected
