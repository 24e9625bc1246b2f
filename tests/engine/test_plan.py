"""How many seeds run at once, and what is refused before anything is compiled."""

from contextlib import nullcontext

import jax
import pytest
from engines import small_config

from jaxattn import experiments
from jaxattn.engine import Settings, memory, plan, programs
from jaxattn.fields import ConfigError

MANY = 40


@pytest.fixture(scope="module")
def many():
    return small_config(run_arms=("sgd",), seeds=MANY)


@pytest.fixture
def compiled(monkeypatch, many):
    """Plans without compiling: each program works on so many bytes."""
    monkeypatch.setattr(programs, "build", lambda *_, **__: {})
    monkeypatch.setattr(programs, "working_bytes", lambda _: 1000)
    ready = "callable_programs"
    monkeypatch.setattr(programs, ready, lambda e, s, own, c, **_: own)

    def planned(devices, experiment=many, **settings):
        return plan.compiled(experiment, devices, Settings(**settings))

    return planned


class Accelerator:
    """Enough of a device to plan for."""

    platform = "gpu"

    def __init__(self, size):
        self.size = size

    def memory_stats(self):
        return self.size and {"bytes_limit": self.size}


def test_on_a_cpu_one_seed_a_worker(monkeypatch, compiled):
    devices = jax.devices()[:1]
    own, room = compiled(devices, workers=3)
    assert (own.together, own.workers, own.slots) == (1, 3, 3)
    few = small_config(run_arms=("sgd",), seeds=2)
    assert compiled(devices, few, workers=3)[0].slots == 2
    need = room.seed_bytes
    monkeypatch.setattr(memory, "of_device", lambda _: 5 * need)
    assert compiled(devices, workers=9)[0].slots == 2  # half of 5
    assert compiled(devices, workers=9, memory_share=0.9)[0].slots == 4
    assert compiled(devices, workers=9, together=2)[0].slots >= 2
    with pytest.raises(ConfigError, match=r"^memory_share=0.1: 3 of 40 seeds of"):
        compiled(devices, together=3, memory_share=0.1)


@pytest.mark.parametrize(
    ("devices", "room", "together"),
    [(1, 100, 40), (1, 21, 10), (4, 100, 10), (4, 9, 4)],
)
def test_on_an_accelerator_as_many_as_fit(compiled, devices, room, together):
    _, found = compiled(jax.devices()[:1])
    own, _ = compiled([Accelerator(room * found.seed_bytes)] * devices)
    assert (own.together, own.batch) == (together, together * devices)


def test_where_not_one_fits_it_says_so(compiled):
    said = r"^memory_share=0.5: 1 of 40 seeds .*; must be a larger share"
    with pytest.raises(ConfigError, match=said):
        compiled([Accelerator(1000)])


def test_a_device_that_does_not_say_gets_one_seed_or_what_is_asked(compiled):
    silent = [Accelerator(None)]
    assert compiled(silent, together=1)[0].slots == 1
    assert compiled(silent, together=7)[0].slots == 7


@pytest.mark.parametrize("share", [float("nan"), -0.1, 1.1])
def test_a_share_is_between_0_and_1(compiled, share):
    with pytest.raises(ConfigError, match="must be a number from 0 to 1"):
        compiled(jax.devices()[:1], memory_share=share)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("sticky", {"task.length": 10**6}, "task.length=1000000: a causal mask of 999"),
        ("sticky", {"steps": 10**9, "eval_every": 1}, "eval_every=1: makes 10000"),
        ("rates", {"steps": 10**9, "eval_every": 1}, "eval_every=1: what is recorded"),
        (
            "hmm",
            {"steps": 10**9, "eval_every": 1, "run_arms": ("transformer",)},
            "eval_every=1: what is recorded of",
        ),
        ("sticky", {"seeds": 10**6, "eval_every": 1}, "eval_every=1: what is recorded"),
        (
            "sticky",
            {
                "task.length": 20_000,
                "snapshot_length": 10_000,
                "run_arms": ("sgd",),
                "gradient": "autodiff",
            },
            "snapshot_length=",
        ),
        ("toy", {"task.length": 10**6}, "task.length=1000000: what is recorded of all"),
        ("recall", {"task.filler": 10**6}, "task.name='recall': a causal mask of 1000"),
        ("sticky", {"model.d_k": 10**5, "task.d_x": 10**5}, "memory_share=0.5: 1 of 2"),
    ],
)
def test_what_does_not_fit_is_one_line_before_it_is_made(
    monkeypatch, name, changes, said
):
    def never(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(memory, "of_host", lambda: 4 * 2**30)
    monkeypatch.setattr(programs, "build", never)
    config = experiments.load(f"configs/{name}.py:smoke").config
    config.update_from_flattened_dict(changes)
    with (
        jax.numpy_dtype_promotion("standard"),  # Adam's own arithmetic
        pytest.raises(ConfigError, match=f"^{said}.*; must"),
    ):
        plan.compiled(experiments.resolve(config), jax.devices()[:1], Settings())


def test_what_programs_work_on_counts(monkeypatch, many):
    """Dense attention of 20,000 positions is refused once XLA says what it needs."""
    needed = 2**40
    monkeypatch.setattr(programs, "build", lambda *_, **__: {"train": None})
    monkeypatch.setattr(memory, "of_program", lambda _: needed)
    with pytest.raises(ConfigError, match=r"^memory_share=0.5: 1 of 40 seeds of 1.02e"):
        plan.compiled(many, jax.devices()[:1], Settings())


def test_the_need_is_what_xla_asks_for():
    """Of arguments, results and what it works on, of the hungriest program."""
    experiment = small_config(run_arms=("sgd",))
    sketched = programs.sketch(experiment)
    own = plan.Plan(tuple(jax.devices()[:1]), 1, 1)
    built = programs.build(experiment, sketched, own, breakable=nullcontext)
    _, room = plan.compiled(experiment, jax.devices()[:1], Settings())
    for analysis in (p.memory_analysis() for p in built.values()):
        needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        assert room.seed_bytes >= needed + analysis.argument_size_in_bytes / 2
