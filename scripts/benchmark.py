"""Times attention by blocks, the laws of one head, and training, as ratios to rivals.

python scripts/benchmark.py --help

attention: `streaming.attend` with taps, forward and backward, causal, d = 64, against
    `jax.grad` of dense attention, `jax.nn.dot_product_attention` and, where torch can
    be imported, its fused `scaled_dot_product_attention`; one row for each of --lengths
    and --heads. On a GPU in bfloat16, and against cuDNN's too.
head: loss and gradient of one head of configs/sticky.py, by `streaming.attend` and by
    `laws.loss_and_gradient`, against autodiff of the dense forward pass.
training: a seed and step of configs/sticky.py, evaluations and all, on all cores,
    against an eager loop of torch, dense.
workers: the same by one worker, by one for each core, and by a CPU device for each core
    as one mesh.

Rivals are timed in turn, in one process; a ratio is the median over repeats of both in
one turn, with the sign test's interval. The floor of attention is what its arithmetic
takes at this machine's own rates of a large matrix product and of exponentials.
"""

import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import experiments
from jaxattn.algorithms import gradients
from jaxattn.analysis import stats
from jaxattn.cli import command
from jaxattn.cli.command import Flag
from jaxattn.engine import Settings, plan, rounds
from jaxattn.experiments import Experiment
from jaxattn.experiments.experiment import Problem, stream
from jaxattn.fields import TEXT, integer, integers, some_of
from jaxattn.kernels import streaming
from jaxattn.theory import attention
from jaxattn.theory.attention import Params
from jaxattn.views import tables

try:
    import torch
except ImportError:  # a rival, not a dependency
    torch = None

WIDTH = 64  # d of the attention rows
# A rival that makes T x T arrays is left out where one turn would need more than this.
_DENSE_BYTES = 8 * 2**30

Call = Callable[[], object]
Timing = dict[str, np.ndarray]  # what -> seconds of each repeat


class Setting(NamedTuple):
    """What is timed, how often."""

    lengths: tuple[int, ...]  # of attention's rows
    heads: tuple[int, ...]
    length: int  # symbols of the sticky chain
    repeats: int


def main(line: command.Line) -> int:
    """Runs; returns the exit code."""
    flags = line.flags
    path = Path(flags.json) if flags.json else None
    if path:
        _require_writable(path)
    # All parts but the mesh of the last use one.
    jax.config.update("jax_num_cpu_devices", max(os.cpu_count() or 1, 1))
    setting = Setting(flags.lengths, flags.heads, flags.length, flags.repeats)
    summary = {
        "jax": jax.__version__,
        "torch": torch and torch.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "repeats": setting.repeats,
    }
    for part in flags.parts:
        summary[part], text = PARTS[part](setting)
        print(f"{text}\n", flush=True)
        if path:
            path.write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
    return 0


def _require_writable(path: Path) -> None:
    """Raises FlagError, before anything is timed, where no file can be written."""
    there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise command.FlagError(
            f"json={str(path)!r}: cannot be written ({error.strerror}); allowed: a file"
            " in a folder that is there"
        ) from None
    if not there:
        path.unlink()


# --- attention


def time_attention(setting: Setting) -> tuple[dict, str]:
    """Rows of `streaming.attend` against its rivals, and their text."""
    rates = matrix_rate(setting), exponential_rate(setting)
    found, names = [], []
    for heads in setting.heads:
        for length in setting.lengths:
            timing = _in_turn(setting, attention_calls(length, heads))
            found.append(attention_row(length, heads, timing, *rates))
            names += [name for name in found[-1]["ratios"] if name not in names]
    rows = [["T", "H", "attend, ms", *(f"{name} /" for name in names), "floor", "taps"]]
    for row in found:
        ratios = [_ratio_text(row["ratios"].get(name)) for name in names]
        cost = f"{row['over_floor']:.2f} x", f"{100 * row['tap_cost']:.0f} %"
        head = str(row["length"]), str(row["heads"]), f"{row['attend_ms']:.1f}"
        rows.append([*head, *ratios, *cost])
    kind = jnp.dtype(_attention_dtype()).name
    return {"rates": rates, "rows": found}, (
        f"attention, forward and backward, causal, {kind}, d = {WIDTH}, taps on; times"
        f" as long as attend\nfloor: {rates[0] / 1e9:.0f} GFLOP/s in products,"
        f" {rates[1] / 1e9:.1f} G/s exponentials; taps: of the backward pass\n\n"
        f"{tables.text_table(rows)}"
    )


def attention_calls(length: int, heads: int) -> dict[str, Call]:
    """The rivals, compiled, on the same numbers."""
    shape = length, heads, WIDTH
    arrays = [
        jax.random.normal(jax.random.key(n), shape, _attention_dtype())
        for n in range(4)
    ]
    calls = {
        "attend": _gradient_call(_attend, arrays, streaming.zero_tap(length, (heads,))),
        "no taps": _gradient_call(_attend, arrays),
        "forward": _compiled(functools.partial(_attend, tap=None), *arrays[:3]),
    }
    if 5 * heads * length**2 * 4 < _DENSE_BYTES:
        calls["dense"] = _gradient_call(_dense, arrays)
        calls["jax.nn"] = _gradient_call(_jax_nn, arrays)
    if jax.default_backend() == "gpu":
        cudnn = functools.partial(_jax_nn, implementation="cudnn")
        calls["cuDNN"] = _gradient_call(cudnn, arrays)
    if torch is not None and jax.default_backend() == "cpu":
        calls["torch"] = _torch_call(arrays)
    return calls


def _attend(query, key, value, tap):
    return streaming.attend(query, key, value, causal=True, tap=tap)


def _dense(query, key, value, tap):
    del tap

    def head(query, key, value):
        score = query @ key.T / math.sqrt(WIDTH)
        score = jnp.where(attention.causal_mask(len(query)), score, -jnp.inf)
        return jax.nn.softmax(score) @ value

    if query.shape[1] == 1:  # plain products are faster than batches of one
        return head(query[:, 0], key[:, 0], value[:, 0])[:, None]
    return jax.vmap(head, in_axes=1, out_axes=1)(query, key, value)


def _jax_nn(query, key, value, tap, implementation=None):
    del tap
    batch = (array[None] for array in (query, key, value))
    return jax.nn.dot_product_attention(
        *batch, is_causal=True, implementation=implementation
    )[0]


def _gradient_call(function: Callable, arrays: list, tap=None) -> Call:
    def total(query, key, value, tap, upstream):
        return jnp.vdot(upstream, function(query, key, value, tap))

    asked = (0, 1, 2) if tap is None else (0, 1, 2, 3)
    return _compiled(jax.grad(total, asked), *arrays[:3], tap, arrays[3])


def _torch_call(arrays: list) -> Call:
    query, key, value, upstream = (
        torch.from_numpy(np.array(array).swapaxes(0, 1)[None].copy())
        for array in arrays
    )
    inputs = [array.requires_grad_() for array in (query, key, value)]

    def call():
        context = torch.nn.functional.scaled_dot_product_attention(
            *inputs, is_causal=True
        )
        return torch.autograd.grad(context, inputs, upstream)

    return call


def attention_row(length: int, heads: int, timing: Timing, products, exps) -> dict:
    """The numbers of one row."""
    pairs = heads * length * (length + 1) / 2
    # Two products forward, five backward; one exponential each way.
    floor = pairs * (7 * 2 * WIDTH / products + 2 / exps)
    rivals = [n for n in timing if n not in ("attend", "no taps", "forward")]
    plain = timing["no taps"]
    return {
        "length": length,
        "heads": heads,
        "attend_ms": _milliseconds(timing["attend"]),
        "no_taps_ms": _milliseconds(plain),
        "ratios": {n: _ratio(timing[n], timing["attend"]) for n in rivals},
        "over_floor": float(np.median(timing["attend"]) / floor),
        "tap_cost": float(
            np.median((timing["attend"] - plain) / (plain - timing["forward"]))
        ),
    }


def matrix_rate(setting: Setting) -> float:
    """Floating-point operations a second of a product of large matrices."""
    size = 2048
    array = jnp.ones((size, size), _attention_dtype())
    return 2 * size**3 / _fastest(setting, _compiled(jnp.matmul, array, array))


def exponential_rate(setting: Setting) -> float:
    """Exponentials a second, of numbers that stay in cache."""
    array, times = jnp.ones((512, 512)), 100

    def repeated(array):
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.exp(-x), array)

    return times * array.size / _fastest(setting, _compiled(repeated, array))


def _fastest(setting: Setting, call: Call) -> float:
    return float(min(_in_turn(setting, {"": call})[""]))


def _attention_dtype():
    return jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32


# --- one head


def time_head(setting: Setting) -> tuple[dict, str]:
    """Ways to the gradient of one head of the sticky chain, and their text."""
    params, problem = _first_seed(_sticky(setting, seeds=1))
    sequence = jax.tree.map(lambda leaf: leaf[0], problem.train)
    wiring = gradients.Wiring(causal=True)
    calls = {
        name: _compiled(functools.partial(way, wiring=wiring), params, sequence)
        for name, way in gradients.GRADIENTS.items()
    }
    cores, found = _cores(), {}
    everything = f"{len(cores)} cores" if cores else jax.devices()[0].device_kind
    if len(cores) > 1:
        with _pinned(cores[0]):
            found["one core"] = _in_turn(setting, calls)
        at_once = {name: _at_once(call, len(cores)) for name, call in calls.items()}
        found[f"{everything}, a sequence each"] = _in_turn(setting, at_once)
    found[f"{everything}, one sequence"] = _in_turn(setting, calls)
    rows = [["", *(f"{name}, ms" for name in calls), "/ streaming", "/ laws"]]
    numbers = {}
    for place, timing in found.items():
        ratios = {n: _ratio(timing["autodiff"], timing[n]) for n in calls}
        milliseconds = {n: _milliseconds(seconds) for n, seconds in timing.items()}
        numbers[place] = {"ms": milliseconds, "autodiff_over": ratios}
        times = [f"{ms:.2f}" for ms in milliseconds.values()]
        over = [_ratio_text(ratios[name]) for name in ("streaming", "laws")]
        rows.append([place, *times, *over])
    length = len(sequence.targets)
    return {"length": length, "rows": numbers}, (
        f"head: loss and gradient of one head of configs/sticky.py, T = {length},"
        f" float32;\nautodiff of the dense forward pass takes so many times as long\n\n"
        f"{tables.text_table(rows)}"
    )


def _at_once(call: Call, number: int) -> Call:
    """The call in so many threads, as the engine deals seeds."""
    pool = ThreadPoolExecutor(number)
    return lambda: list(pool.map(lambda _: call(), range(number)))


# --- one step of an algorithm


def time_algorithms(setting: Setting) -> tuple[dict, str]:
    """A step of each algorithm of the sticky chain beside one of sgd, and the text."""
    arms = ("sgd", "values_fast", "em_prototype", "em_majorised")
    experiment = _sticky(setting, seeds=1, run_arms=arms)
    params, problem = _first_seed(experiment)
    sequence = jax.tree.map(lambda leaf: leaf[0], problem.train)
    calls = {}
    for arm in experiment.arms:
        algorithm = arm.algorithm(arm.rates)
        state = algorithm.init(params)
        step = _compiled(algorithm.step, state, sequence, jax.random.key(0))
        calls[arm.name] = step
    timing = _in_turn(setting, calls)
    rows, numbers = [["arm", "ms", "over sgd"]], {}
    for arm, seconds in timing.items():
        ratio = _ratio(seconds, timing["sgd"])
        numbers[arm] = {"ms": _milliseconds(seconds), "over_sgd": ratio}
        rows.append([arm, f"{numbers[arm]['ms']:.2f}", _ratio_text(ratio)])
    length = len(sequence.targets)
    return {"length": length, "rows": numbers}, (
        f"algorithms: a step of the arms of configs/sticky.py, T = {length}\n\n"
        f"{tables.text_table(rows)}"
    )


# --- training


def time_training(setting: Setting) -> tuple[dict, str]:
    """A seed and step of the sticky run, with all that the run does, and the text."""
    workers = max(len(_cores()), 1)
    own = _sticky(setting, seeds=workers, steps=10**6, run_arms=("sgd",))
    calls = {"jaxattn": _training(own, workers=workers)}
    if torch is not None and jax.default_backend() == "cpu":
        rate = float(own.arms[0].rates["learning_rate"])
        calls["torch"] = _torch_training(*_first_seed(own), rate, own.eval_every)
    timing = _in_turn(setting, calls)
    timing["jaxattn"] = timing["jaxattn"] / (own.seeds * own.eval_every)
    text = (
        f"training: configs/sticky.py, arm sgd, {own.seeds} seeds, with evaluations"
        f" every {own.eval_every} steps, T = {setting.length - 1}\n\n"
        f"{_milliseconds(timing['jaxattn']):.2f} ms for a seed and step"
    )
    found = {"seed_step_ms": _milliseconds(timing["jaxattn"])}
    if "torch" in timing:
        timing["torch"] = timing["torch"] / own.eval_every
        found["torch_ms"] = _milliseconds(timing["torch"])
        found["torch_ratio"] = _ratio(timing["torch"], timing["jaxattn"])
        text += (
            "; torch, eager and dense, without evaluations:\n"
            f"{found['torch_ms']:.1f} ms, {_ratio_text(found['torch_ratio'])} times as"
            " long"
        )
    return found, text


def _training(experiment: Experiment, devices: int = 1, **settings: int) -> Call:
    """A round of seeds, from the first evaluation to the second."""
    where = jax.devices()[:devices]
    programs, _ = plan.compiled(experiment, where, Settings(**settings))
    if programs.plan.slots < experiment.seeds:
        length = experiment.config["task"]["length"]
        raise command.FlagError(
            f"length={length}: must be what the memory has room for"
        )
    carry = rounds.advance(programs, rounds.start())
    return lambda: rounds.advance(programs, carry)


def _torch_training(params: Params, problem: Problem, rate: float, steps: int) -> Call:
    """So many steps of gradient descent on a seed's sequence."""
    params, one = jax.tree.map(np.array, (params, problem))
    weights = [torch.from_numpy(w).requires_grad_() for w in params[:4]]
    inputs = torch.from_numpy(one.train.inputs[0])
    targets = torch.from_numpy(one.train.targets[0]).long()
    hidden = ~torch.from_numpy(attention.causal_mask(len(targets)))

    def call():
        for _ in range(steps):
            w_q, w_k, w_v, w_o = weights
            score = (inputs @ w_q) @ (inputs @ w_k).T / math.sqrt(w_q.shape[1])
            weight = torch.softmax(score.masked_fill(hidden, -math.inf), dim=1)
            logit = weight @ (inputs @ w_v) @ w_o
            loss = torch.nn.functional.cross_entropy(logit, targets)
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight -= rate * gradient

    return call


# --- workers


def time_workers(setting: Setting) -> tuple[dict, str]:
    """A seed and step by one worker, by several, and by a mesh; and the text."""
    if jax.default_backend() != "cpu":
        return {}, "workers: of a CPU only"
    cores = len(jax.devices())
    config = _sticky(setting, seeds=cores, steps=10**6, run_arms=("sgd",))
    one = _sticky(setting, seeds=1, steps=10**6, run_arms=("sgd",))
    names = ["one worker", f"{cores} workers", f"a mesh of {cores} devices"]
    calls = [
        _training(one),
        _training(config, workers=cores),
        _training(config, devices=cores),
    ]
    busy = {name: _cores_busy(call) for name, call in zip(names, calls, strict=True)}
    timing = _in_turn(setting, dict(zip(names, calls, strict=True)))
    rows = [["", "seed-steps a second", "times one worker's", "cores busy"]]
    numbers = {}
    for name, seconds in timing.items():
        seeds = 1 if name == names[0] else cores
        rate = seeds * config.eval_every / seconds
        ratio = _ratio(seeds * timing[names[0]], seconds)
        numbers[name] = {"seed_steps": float(np.median(rate)), "ratio": ratio}
        cells = f"{np.median(rate):.0f}", _ratio_text(ratio), f"{busy[name]:.2f}"
        rows.append([name, *cells])
    return {"cores": cores, "rows": numbers}, (
        "workers: configs/sticky.py, arm sgd, with evaluations every"
        f" {config.eval_every} steps, T = {setting.length - 1}\n\n"
        f"{tables.text_table(rows)}"
    )


def _cores_busy(call: Call) -> float:
    call()
    before, began = time.process_time(), time.perf_counter()
    for _ in range(5):
        call()
    return (time.process_time() - before) / (time.perf_counter() - began)


def _sticky(setting: Setting, **fields) -> Experiment:
    """configs/sticky.py at the length asked for, without diagnostics at the end."""
    path = Path(__file__).parents[1] / "configs" / "sticky.py"
    config = experiments.load(str(path)).config
    config.task.length = setting.length
    config.update({"diagnostics_length": 0, "snapshot_seeds": ()} | fields)
    return experiments.resolve(config)


def _first_seed(experiment: Experiment) -> tuple[Params, Problem]:
    """Where an arm starts, and what it is given."""

    @jax.jit
    def drawn() -> tuple[Params, Problem]:
        key = experiment.seed_key(0)
        return experiment.arms[0].start(stream(key, "init")), experiment.draw(key)

    return drawn()


# --- timing


def _compiled(function: Callable, *arguments) -> Call:
    program = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


def _in_turn(setting: Setting, calls: dict[str, Call]) -> Timing:
    """Seconds of a call, all in turn, so that a slow moment falls on all alike.

    Short calls are made several times in a row, after one that is not timed: a training
    loop finds its own data in cache, not its rival's, and none of its threads spinning.
    """
    seconds = {name: [] for name in calls}
    times = {}
    for name, call in calls.items():
        call()  # the first pays for memory
        times[name] = max(1, min(5, int(0.3 / _seconds(call, 1))))
    for _ in range(setting.repeats):
        for name, call in calls.items():
            if times[name] > 1:
                call()
            seconds[name].append(_seconds(call, times[name]))
    return {name: np.array(found) for name, found in seconds.items()}


def _seconds(call: Call, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def _cores() -> list[int]:
    """Cores that this process may use, where that can be asked and changed."""
    if jax.default_backend() != "cpu" or not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Holds every thread of this process, XLA's too, on one core."""
    before = os.sched_getaffinity(0)
    try:
        _hold({core})
        yield
    finally:
        _hold(before)


def _hold(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _milliseconds(seconds: np.ndarray) -> float:
    return 1e3 * float(np.median(seconds))


def _ratio(rival: np.ndarray, ours: np.ndarray) -> dict:
    return stats.median(rival / ours)._asdict()


def _ratio_text(ratio: dict | None) -> str:
    if ratio is None:
        return "-"
    interval = ratio["ci95"]
    ends = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return f"{ratio['median']:.2f}{ends}"


PARTS: dict[str, Callable[[Setting], tuple[dict, str]]] = {
    "attention": time_attention,
    "head": time_head,
    "algorithms": time_algorithms,
    "training": time_training,
    "workers": time_workers,
}
COMMAND = command.Command(
    about="Times attention by blocks, the laws of one head, and training, as ratios to"
    " rivals.",
    flags=(
        Flag("parts", tuple(PARTS), some_of(PARTS), "what to time"),
        Flag(
            "lengths",
            (4096,),
            integers(1, least=1),
            "attention: T of each row",
        ),
        Flag("heads", (1,), integers(1, least=1), "attention: H of each row"),
        Flag("length", 2000, integer(2, 1_000_000), "head, training: symbols"),
        Flag(
            "repeats",
            10,
            integer(1, 1_000_000),
            "turns; 6 or more have an interval",
        ),
        Flag("json", None, TEXT, "also write the numbers to this file"),
    ),
    main=main,
    examples=("--lengths=1024,2048 --heads=1,8", "--parts=training --repeats=6"),
)

if __name__ == "__main__":
    sys.exit(command.run(COMMAND, sys.argv))
