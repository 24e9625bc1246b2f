"""The proof of the laws: runs it, and formats its results."""

import functools
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.algorithms import Algorithm
from jaxattn.analysis import stats
from jaxattn.experiments.proof import Drawn, ProofSettings
from jaxattn.proof import check, first_order
from jaxattn.proof.errors import WITNESSES
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention
from jaxattn.theory.attention import Params
from jaxattn.views import tables

Progress = Callable[[str, int], None]  # name of a part, and how much of `work`

_SEQUENCES = {"one sequence": False, "fresh ones": True}  # -> config.fresh
_THIRDS = 3  # of a run
_SHORT = {"float64": "f64", "float32": "f32"}


def work(settings: ProofSettings) -> int:
    """Counts the pieces of work, for a progress bar."""
    slopes = 2 * len(first_order.COORDINATES)
    shares = len(settings.arms)
    return check.passes(settings.seeds, _shapes(settings)) + slopes + shares


def prove(settings: ProofSettings, progress: Progress) -> dict[str, Any]:
    """Checks every law, and the order of the remainder of a step.

    Args:
      settings: from `experiments.resolve`.
      progress: called after each piece of `work`.

    Returns:
      The content of summary.json; `holds` is whether all is within the bounds.
    """
    started = time.perf_counter()
    shapes = _shapes(settings)
    found = check.check(
        settings.seeds, settings.root, shapes, lambda done: progress("laws", done)
    )
    bounds = settings.bounds
    broken = [fault._asdict() for fault in check.broken(found, bounds)]
    for fault in broken:
        fault["shape"] = fault["shape"]._asdict()
        fault["error"] = _finite(fault["error"])
    checked = time.perf_counter()
    drawn = _draw(settings)
    slopes = _slopes(settings, drawn, lambda: progress("slopes", 1))
    shares = _shares(settings, drawn, lambda: progress("shares", 1))
    steep = all(_within(slope, settings.slopes.tolerance) for slope in slopes.values())
    return {
        "config": settings.name,
        "seeds": settings.seeds,
        "holds": not broken
        and steep
        and all(some.any() for some in found.weighed.values()),
        "bounds": bounds._asdict(),
        "shapes": [shape._asdict() for shape in shapes],
        "laws": {
            law: {
                "weighed": int(found.weighed[law].sum()),
                "weighed_by_kind": {
                    kind: int(found.weighed[law][np.array(found.kinds) == kind].sum())
                    for kind in check.KINDS
                },
                "errors": _worst(errors),
            }
            for law, errors in found.errors.items()
        },
        "broken": broken,
        "slopes": slopes,
        "slope_tolerance": settings.slopes.tolerance,
        "decades": settings.slopes.decades,
        "shares": shares,
        "share_steps": _share_steps(settings),
        "wall_seconds": {
            "laws": checked - started,
            "first_order": time.perf_counter() - checked,
        },
    }


def _worst(errors: Any) -> Any:
    """Takes the largest of each array in nested dicts."""
    if isinstance(errors, dict):
        return {name: _worst(inner) for name, inner in errors.items()}
    return _finite(errors.max())


def _finite(number: float) -> float | None:
    """Converts to a number of JSON, None for what is not finite."""
    return float(number) if np.isfinite(number) else None


def _shapes(settings: ProofSettings) -> tuple[check.Shape, ...]:
    # A stream apart from those of the problems.
    stream = np.random.SeedSequence(settings.root, spawn_key=(1,))
    rng = np.random.default_rng(stream)
    return check.deal_shapes(rng, settings.shapes, settings.longest, settings.widest)


def _slopes(
    settings: ProofSettings, drawn: Drawn, progress: Callable[[], None]
) -> dict[str, Any]:
    """Fits slopes of the remainder, on random heads and on the task at the first step.

    Each along the step of gradient descent and along a random direction.
    """
    sequence = jax.tree.map(lambda leaf: leaf[:, 0], drawn.problem.train)
    on_task = drawn.params, sequence.inputs, sequence.targets
    length = sequence.targets.shape[1]
    mask = attention.causal_mask(length) if settings.causal else None

    def slopes(name: str, key: jax.Array, head: tuple) -> jax.Array:
        descent = first_order.COORDINATES[name](*head)
        downhill = jax.tree.map(jnp.negative, descent.gradient)
        leaves, structure = jax.tree.flatten(downhill)
        keys = jax.random.split(key, len(leaves))
        random = [
            jnp.linalg.norm(leaf) * jax.random.normal(k, leaf.shape, leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        motions = jax.tree.map(
            lambda *pair: jnp.stack(pair), downhill, structure.unflatten(random)
        )
        setting = {"decades": settings.slopes.decades, "number": settings.slopes.rates}
        return jax.lax.map(
            lambda motion: first_order.reach(descent, motion, **setting).slope, motions
        )

    def one(name: str, where: str) -> dict[str, Any]:
        with check.exact():
            key = jax.random.key(settings.root)
            if where == "random":
                keys = jax.random.split(key, settings.slopes.problems)
                found = jax.jit(
                    jax.vmap(lambda key: slopes(name, key, _random_head(key)))
                )(keys)
            else:
                keys = jax.random.split(key, len(sequence.targets))
                found = jax.jit(
                    jax.vmap(lambda key, *head: slopes(name, key, (*head, mask)))
                )(keys, *_double(on_task))
        progress()
        found = np.asarray(found).ravel()
        least, middle, largest = (
            _finite(f(found)) for f in (np.min, np.median, np.max)
        )
        return {"least": least, "median": middle, "largest": largest, "n": len(found)}

    cases = list(itertools.product(first_order.COORDINATES, ("random", settings.task)))
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda case: one(*case), cases)
        return dict(zip(map(", ".join, cases), found, strict=True))


def _random_head(key: jax.Array) -> tuple[Params, jax.Array, jax.Array, jax.Array]:
    """Draws params, inputs, targets and mask; weights and inputs are N(0, 1)."""
    length, d_x, num_classes = 12, 5, 6
    init, inputs, targets, allowed = jax.random.split(key, 4)
    params = attention.init_params(
        init, d_x=d_x, d_k=4, d_v=3, num_classes=num_classes, scale=1, dtype=float
    )
    return (
        params,
        jax.random.normal(inputs, (length, d_x)),
        jax.random.randint(targets, (length,), 0, num_classes),
        jax.random.bernoulli(allowed, 0.7, (length, length)),
    )


def _draw(settings: ProofSettings) -> Drawn:
    """Draws what the short runs are given, with a leading axis of seeds.

    In float32, as the engine draws it: under x64 JAX would draw other numbers.
    """
    root = jax.random.key(settings.root)

    def one(seed: jax.Array) -> Drawn:
        return settings.draw(jax.random.fold_in(root, seed))

    seeds = jnp.arange(settings.shares.seeds)
    return jax.device_get(jax.jit(jax.vmap(one))(seeds))


def _shares(
    settings: ProofSettings,
    drawn: Drawn,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Computes predicted over actual loss change of steps, by arm."""

    def one(arm: str) -> list[first_order.Traces]:
        with check.exact():
            follow = jax.jit(functools.partial(_follow, settings, settings.arms[arm]))
            traces = [
                jax.device_get(follow(jnp.asarray(fresh), _double(drawn)))
                for fresh in _SEQUENCES.values()
            ]
        progress()
        return traces

    def share(trace: first_order.Trace, first: int, last: int) -> dict[str, Any]:
        # The median step: the share is ill-defined where a loss hardly changes.
        of_step = (trace.predicted / trace.actual)[:, first:last]
        return stats.estimate(np.median(of_step, axis=1))._asdict()

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(one, settings.arms))
    return {
        f"{arm}, {sequences}": {
            seen_from: [share(trace, *steps) for steps in _share_steps(settings)]
            for seen_from, trace in traces._asdict().items()
        }
        for arm, by_sequences in zip(settings.arms, found, strict=True)
        for sequences, traces in zip(_SEQUENCES, by_sequences, strict=True)
    }


def _share_steps(settings: ProofSettings) -> list[list[int]]:
    ends = np.linspace(0, settings.shares.steps, _THIRDS + 1).astype(int).tolist()
    return [list(pair) for pair in itertools.pairwise(ends)]


def _follow(
    settings: ProofSettings, algorithm: Algorithm, fresh: jax.Array, drawn: Drawn
) -> first_order.Traces:
    """Trains short runs of an arm, one seed after another."""

    def one(own: Drawn) -> first_order.Traces:
        def sample(step: jax.Array) -> Batch:
            at = jnp.where(fresh, step, 0)
            return jax.tree.map(lambda leaf: leaf[at], own.batches)

        return first_order.follow(
            algorithm,
            settings.gradient,
            own.params,
            sample,
            own.problem.heldout,
            steps=settings.shares.steps,
            key=jax.random.key(settings.root),  # nothing is drawn from it
        )

    return jax.lax.map(one, drawn)


def _double(tree):
    """Converts to float64."""
    return jax.tree.map(
        lambda x: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x,
        tree,
    )


# --- text


def terminal(summary: dict[str, Any]) -> str:
    """Formats the proof for a terminal of 80 columns."""
    bounds = summary["bounds"]
    blocks = [
        f"{summary['config']}: largest relative error of each law over"
        f" {summary['seeds']} problems, shapes {len(summary['shapes'])},\nagainst"
        " autodiff in float64 and against central differences, the law bare, under\n"
        f"jit, under vmap, and both. Bounds: {bounds['float64']:.0e} for f64,"
        f" {bounds['float32']:.0e} for f32, {bounds['difference']:.0e} for f64\n"
        "against differences; for weights and loss_and_gradient times the largest"
        " score,\nwhose rounding limits them",
        _law_table(summary),
        "Order of the remainder of a step of descent and of one in a random direction:"
        f"\nslope of log |R| against log rate over {summary['decades']:g} decades,"
        f" 2 ± {summary['slope_tolerance']:g} if the first\norder is right",
        tables.text_table(_slope_rows(summary)),
        "Loss change of a step to first order over its actual loss change: median of"
        "\nthe steps, then mean over seeds ± half a 95 % interval. Above 1: the step"
        "\nlowered the loss by less than predicted",
        tables.text_table(_share_rows(summary)),
        *_verdict(summary),
    ]
    return "\n\n".join(blocks) + "\n"


def _law_table(summary: dict[str, Any]) -> str:
    broken = {fault["law"] for fault in summary["broken"]}
    header = " ".join(f"{name:>5}" for name in check.TRANSFORMATIONS)
    lines = [
        f"{'':31} {'autodiff':^23} {'differences':^23}",
        f"{'law':31} {header} {header}",
    ]
    lines.append("-" * len(lines[1]))
    for law, entry in summary["laws"].items():
        for precision, errors in entry["errors"].items():
            name, mark = law, "!" if law in broken else " "
            if precision != next(iter(entry["errors"])):
                name = ""
            cells = [
                _digit(errors[transformation][witness])
                for witness in WITNESSES
                for transformation in check.TRANSFORMATIONS
            ]
            lines.append(f"{name:27}{mark}{_SHORT[precision]} " + " ".join(cells))
    return "\n".join(lines)


def _digit(error: float | None) -> str:
    if error is None:
        return "  inf"
    return f"{'0' if error == 0 else f'{error:.0e}':>5}"


def _slope_rows(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["step on", "least", "median", "largest", "steps"]]
    for name, slope in summary["slopes"].items():
        sizes = [_slope(slope[key]) for key in ("least", "median", "largest")]
        rows.append([name, *sizes, str(slope["n"])])
    return rows


def _slope(slope: float | None) -> str:
    return "none" if slope is None else f"{slope:.4f}"


def _share_rows(summary: dict[str, Any]) -> list[list[str]]:
    steps = [f"{first}-{last}" for first, last in summary["share_steps"]]
    rows = [["steps on", "loss on", *steps]]
    for name, by_sequence in summary["shares"].items():
        for sequence, thirds in by_sequence.items():
            rows.append([name, sequence, *(tables.mean(share) for share in thirds)])
    return rows


def _verdict(summary: dict[str, Any]) -> list[str]:
    worst = {}  # law -> the fault furthest over its bound
    for fault in summary["broken"]:
        other = worst.setdefault(fault["law"], fault)
        if _excess(fault) > _excess(other):
            worst[fault["law"]] = fault
    lines = [
        f"BROKEN {law}: {_digit(fault['error']).strip()} > {fault['bound']:.0e} against"
        f" {fault['witness']},\n  {_SHORT[fault['precision']]},"
        f" {fault['transformation']}, in problem {fault['seed']} ({fault['kind']})"
        for law, fault in worst.items()
    ]
    lines += [
        f"BROKEN order of {name}: slope {_slope(slope['least'])} to"
        f" {_slope(slope['largest'])}"
        for name, slope in summary["slopes"].items()
        if not _within(slope, summary["slope_tolerance"])
    ]
    lines += [
        f"NOT TESTED {law}: its terms cancel in every problem; more shapes are needed"
        for law, entry in summary["laws"].items()
        if entry["weighed"] == 0
    ]
    return ["\n".join(lines) if lines else "All laws hold."]


def _excess(fault: dict[str, Any]) -> float:
    return np.inf if fault["error"] is None else fault["error"] / (fault["bound"] or 1)


def _within(slope: dict[str, Any], tolerance: float) -> bool:
    ends = slope["least"], slope["largest"]
    return all(end is not None and abs(end - 2) <= tolerance for end in ends)
