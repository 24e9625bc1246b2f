"""What a program needs, before it is compiled; and what there is."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine import memory, sweep
from jaxattn.experiments import config as config_lib

CONFIGS = Path(__file__).parents[1] / "configs"
MATRIX = jax.ShapeDtypeStruct((100, 100), np.float32)
BYTES = 40_000


def peak(function, *arguments):
    return memory.peak(jax.make_jaxpr(function)(*arguments))


def test_a_chain_has_two_links_alive():
    """Each is given back once the next is there."""

    def chain(x):
        for _ in range(5):
            x = jnp.sin(x)
        return x

    assert peak(chain, MATRIX) == 2 * BYTES


def test_what_is_used_later_stays_alive():
    def sums(x):
        parts = [x + 1.0, x + 2.0, x + 3.0, x + 4.0]
        return parts[0] @ parts[1] @ parts[2] @ parts[3]

    # All four parts, and the product of the first two.
    assert peak(sums, MATRIX) == 5 * BYTES


def test_unused_results_and_results_of_the_program():
    def both(x):
        jnp.cos(x)
        return jnp.sin(x), x

    assert peak(both, MATRIX) == BYTES


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_programs_within_programs(wrap):
    inner = wrap(lambda x: jnp.sum(jnp.sin(x) @ jnp.cos(x)))
    assert peak(lambda x: inner(x) + 1.0, MATRIX) == pytest.approx(3 * BYTES, abs=100)


def test_loops_hold_their_body_once():
    def loop(x):
        return jax.lax.fori_loop(0, 1000, lambda _, y: jnp.sin(y) @ y, x)

    assert peak(loop, MATRIX) == pytest.approx(3 * BYTES, abs=100)

    def stacked(x):
        return jax.lax.scan(lambda y, _: (jnp.sin(y), jnp.sum(y)), x, length=1000)

    assert peak(stacked, MATRIX) == pytest.approx(2 * BYTES + 4000, abs=100)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("sticky", {"gradient": "autodiff", "task.length": 1000}),
        pytest.param("sticky", {"run_arms": ("em_majorised",)}, marks=pytest.mark.slow),
        pytest.param("sticky", {}, marks=pytest.mark.slow),
        pytest.param("rates", {"run_arms": ("em_gradient",)}, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_what_xla_asks_for(file, changes):
    config = config_lib.load(str(CONFIGS / f"{file}.py"))
    config.update_from_flattened_dict({"run_arms": config.run_arms[:1]} | changes)
    plan = sweep.plan(config, jax.devices()[:1])
    program = sweep.build(config, plan)
    held = 0
    for analysis in (p.memory_analysis() for p in program.compiled):
        needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        held = max(held, needed + analysis.argument_size_in_bytes)
    assert 1 < plan.seed_bytes / held < 4


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


def small(**changes):
    config = config_lib.load(str(CONFIGS / "sticky.py:smoke"))
    config.update({"run_arms": ("sgd",), "seeds": 40} | changes)
    return config


class Accelerator:
    """Enough of a device to plan for."""

    platform = "gpu"

    def __init__(self, size):
        self.size = size

    def memory_stats(self):
        return self.size and {"bytes_limit": self.size}


def test_on_a_cpu_one_seed_a_worker(monkeypatch):
    devices = jax.devices()[:1]
    plan = sweep.plan(small(), devices, workers=3)
    assert (plan.together, plan.workers, plan.slots) == (1, 3, 3)
    assert sweep.plan(small(seeds=2), devices, workers=3).slots == 2
    need = plan.seed_bytes
    monkeypatch.setattr(memory, "of_device", lambda _: 5 * need)
    assert sweep.plan(small(), devices, workers=9).slots == 2  # half of 5
    assert sweep.plan(small(), devices, workers=9, memory_share=0.9).slots == 4
    assert sweep.plan(small(), devices, workers=9, together=2).slots == 2
    with pytest.raises(config_lib.ConfigError, match=r"^memory_share=0.5: 3 seeds of"):
        sweep.plan(small(), devices, together=3)


@pytest.mark.parametrize(
    ("devices", "room", "together"),
    [(1, 100, 40), (1, 21, 10), (4, 100, 10), (4, 9, 4)],
)
def test_on_an_accelerator_as_many_as_fit(devices, room, together):
    need = sweep.plan(small(), jax.devices()[:1]).seed_bytes
    plan = sweep.plan(small(), [Accelerator(room * need)] * devices)
    assert (plan.together, plan.batch) == (together, together * devices)


def test_where_not_one_fits_it_says_so():
    with pytest.raises(
        config_lib.ConfigError,
        match=r"^memory_share=0.5: 1 seeds .*; allowed: a larger",
    ):
        sweep.plan(small(), [Accelerator(1000)])


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "sticky",
            {"task.length": 10**6},
            r"task.length=1000000: a causal mask of 999",
        ),
        (
            "sticky",
            {"steps": 10**9, "eval_every": 1},
            "eval_every=1: what is kept of a",
        ),
        (
            "rates",
            {"steps": 10**9, "eval_every": 1},
            "eval_every=1: what is kept of all",
        ),
        ("hmm", {"steps": 10**9, "eval_every": 1}, "eval_every=1: what is kept of all"),
        (
            "sticky",
            {"seeds": 10**6, "eval_every": 1},
            "eval_every=1: what is kept of al",
        ),
        (
            "sticky",
            {"task.length": 20_000, "snapshot_length": 10_000},
            "snapshot_length=",
        ),
        (
            "toy",
            {"task.length": 10**6},
            "task.length=1000000: what is kept of all seeds",
        ),
        (
            "recall",
            {"task.filler": 10**6},
            "task.name='recall': a causal mask of 10000",
        ),
        (
            "sticky",
            {"task.length": 20_000, "gradient": "autodiff"},
            "memory_share=0.5: ",
        ),
        (
            "sticky",
            {"model.d_k": 10**5, "task.d_x": 10**5},
            "memory_share=0.5: 1 seeds ",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_before_it_is_made(
    monkeypatch, name, changes, said
):
    monkeypatch.setattr(memory, "of_host", lambda: 4 * 2**30)
    config = config_lib.load(str(CONFIGS / f"{name}.py:smoke"))
    config.update_from_flattened_dict(changes)
    config_lib.check(config)
    with (
        jax.numpy_dtype_promotion("standard"),  # Adam's own arithmetic
        pytest.raises(config_lib.ConfigError, match=f"^{said}.*; allowed"),
    ):
        sweep.plan(config, jax.devices()[:1])


@pytest.mark.parametrize("share", [float("nan"), -0.1, 1.1])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(config_lib.ConfigError, match="allowed: a number from 0 to 1"):
        sweep.plan(small(), jax.devices()[:1], memory_share=share)


def test_a_device_that_does_not_say_gets_one_seed_or_what_is_asked():
    silent = [Accelerator(None)]
    assert sweep.plan(small(), silent).slots == 1
    assert sweep.plan(small(), silent, together=7).slots == 7
