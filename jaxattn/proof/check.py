"""Checks every law against autodiff and against central differences."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.experiments.proof import Bounds
from jaxattn.proof import claims, reference
from jaxattn.proof.claims import LAWS, Gradient, Motion
from jaxattn.proof.errors import (
    CANCELLATION,
    STEPS,
    Evidence,
    errors_of,
    norms_of,
)
from jaxattn.proof.reference import KINDS, Case, Outcome, Problem, Shape

PRECISIONS = {"float64": jnp.float64, "float32": jnp.float32}
TRANSFORMATIONS = ("bare", "jit", "vmap", "both")
PASSES = tuple(itertools.product(PRECISIONS, TRANSFORMATIONS))


class Check(NamedTuple):
    """Errors of all laws, from `check`."""

    # law -> precision -> transformation -> witness -> error (seeds,)
    errors: dict[str, dict[str, dict[str, dict[str, np.ndarray]]]]
    weighed: dict[str, np.ndarray]  # law -> whether a problem tests it (seeds,)
    shapes: tuple[Shape, ...]  # of each seed
    kinds: tuple[str, ...]  # of each seed


class Broken(NamedTuple):
    """A law whose error is above its bound, at its worst seed."""

    law: str
    precision: str
    transformation: str
    witness: str
    error: float
    bound: float
    seed: int
    kind: str
    shape: Shape


class Gathered(NamedTuple):
    """Problems of one shape, with arguments of the laws and evidence."""

    cases: Case  # stacked
    evidence: dict[str, Evidence]  # stacked
    number: int


class Line(NamedTuple):
    """A line for central differences: shifts of the stages, and a reading."""

    shift: dict[str, chex.ArrayTree]  # of stages, for a step of 1
    output: str  # of `Outcome`
    reading: jax.Array  # ⟨reading, outcome⟩ is the value to differentiate
    probe: chex.ArrayTree  # ⟨probe, claim⟩ is its claimed slope
    scale: chex.ArrayTree  # typical size of the probe, leaf by leaf


def deal_shapes(
    rng: np.random.Generator, number: int, longest: int, widest: int
) -> tuple[Shape, ...]:
    """Draws random shapes, log-uniform from 1 up, with at least two classes.

    Args:
      rng: source of randomness.
      number: how many. The first tests every law: at least 3 of everything, 2 groups
        of 2 heads, and fewer classes than a value is wide. The second is all ones, but
        for 2 classes.
      longest: most queries and sources, at least 3.
      widest: the largest of any width, at least 3.

    Returns:
      Shapes.
    """

    def up_to(largest: int) -> int:
        return int(np.floor(np.exp(rng.uniform(0, np.log(largest + 1)))))

    def draw(least: int) -> Shape:
        queries, sources = (max(least, up_to(longest)) for _ in range(2))
        d_x, d_k, d_v, num_classes = (max(least, up_to(widest)) for _ in range(4))
        num_kv_heads, group = (max(min(least, 2), up_to(3)) for _ in range(2))
        widths = d_x, d_k, d_v, max(num_classes, 2)
        return Shape(queries, sources, *widths, num_kv_heads * group, num_kv_heads)

    roomy = draw(3)
    roomy = roomy._replace(num_classes=int(rng.integers(2, roomy.d_v)))
    ones = Shape(*[1] * len(Shape._fields))._replace(num_classes=2)
    shapes = [roomy, ones, *(draw(1) for _ in range(number - 2))][:number]
    return tuple(shapes)


def check(
    seeds: int,
    root: int,
    shapes: Sequence[Shape],
    progress: Callable[[int], None] = lambda done: None,
) -> Check:
    """Checks every law on random problems, in every precision and transformation.

    An error is the norm of a difference relative to the norm of autodiff's result in
    float64, for each array of the result, and the largest of these. Where the terms of
    a result are over a hundred times its size and cancel, it is relative to a hundredth
    of them, and the problem does not count as a test of the law. Errors of a law that
    computes weights from scores are divided by the largest score, see
    `claims.conditioning`. A law in float32 gets arguments rounded to it. A claim that
    is not finite, or of another shape or type, has error inf.

    Args:
      seeds: how many problems, dealt to the shapes and to `KINDS` in turn.
      root: seed of all randomness, with a problem's number.
      shapes: sizes; each is compiled once.
      progress: called with the number of `passes` done since the last call.

    Returns:
      Check.
    """
    dealt, kinds = deal(seeds, len(shapes))

    def gather_shape(number: int) -> Gathered:
        problems = [
            reference.draw_problem(
                np.random.default_rng([root, seed]), shapes[number], kinds[seed]
            )
            for seed in np.flatnonzero(dealt == number)
        ]
        gathered = gather(problems)
        progress(1)
        return gathered

    def measure_all(place: tuple[str, str]) -> dict[str, dict[str, np.ndarray]]:
        parts = []
        for gathered in all_gathered:
            parts.append(measure(gathered, *place))
            progress(1)
        return jax.tree.map(lambda *errors: np.concatenate(errors)[order], *parts)

    used = np.unique(dealt)
    order = np.concatenate([np.flatnonzero(dealt == n) for n in used]).argsort()
    with ThreadPoolExecutor() as pool:
        all_gathered = list(pool.map(gather_shape, used))
        errors = dict(zip(PASSES, pool.map(measure_all, PASSES), strict=True))
    tested = jax.tree.map(
        lambda *parts: np.concatenate(parts)[order], *map(weighed, all_gathered)
    )
    by_law = {
        law: {
            precision: {t: errors[precision, t][law] for t in TRANSFORMATIONS}
            for precision in PRECISIONS
        }
        for law in LAWS
    }
    return Check(by_law, tested, tuple(shapes[n] for n in dealt), tuple(kinds))


def passes(seeds: int, shapes: Sequence[Shape]) -> int:
    """Counts the passes of `check` over all laws, for a progress bar."""
    return len(np.unique(deal(seeds, len(shapes))[0])) * (1 + len(PASSES))


def deal(seeds: int, shapes: int) -> tuple[np.ndarray, list[str]]:
    """Deals shape numbers and kinds to seeds: all kinds with all shapes."""
    seed = np.arange(seeds)
    return seed // len(KINDS) % shapes, [KINDS[n % len(KINDS)] for n in seed]


def broken(found: Check, bounds: Bounds) -> list[Broken]:
    """Lists the bounds that are broken; none if every law holds.

    Args:
      found: from `check`.
      bounds: largest allowed errors.

    Returns:
      One entry for each law, precision, transformation and witness above its bound.
    """
    faults = []
    for law, by_precision in found.errors.items():
        for precision, by_transformation in by_precision.items():
            for transformation, by_witness in by_transformation.items():
                for witness, errors in by_witness.items():
                    bound = getattr(bounds, precision)
                    if witness == "difference":
                        bound = max(bound, bounds.difference)
                    seed = int(np.argmax(errors))
                    if not errors[seed] <= bound:
                        place = (law, precision, transformation, witness)
                        where = (seed, found.kinds[seed], found.shapes[seed])
                        faults.append(
                            Broken(*place, float(errors[seed]), bound, *where)
                        )
    return faults


def gather(problems: Sequence[Problem]) -> Gathered:
    """Gathers evidence by autodiff and differences, in float64, of one shape."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *problems)
    with exact():
        cases, evidence = jax.device_get(jax.jit(jax.vmap(_evidence))(stacked))
    return Gathered(cases, evidence, len(problems))


def weighed(gathered: Gathered) -> dict[str, np.ndarray]:
    """Law -> whether each problem's result is more than rounding (problems,)."""

    def is_more(evidence: Evidence) -> np.ndarray:
        true, terms = (norms_of(x, gathered.number) for x in evidence[:2])
        return (true > CANCELLATION * terms).all(axis=1)

    return {name: is_more(evidence) for name, evidence in gathered.evidence.items()}


def measure(
    gathered: Gathered, precision: str, transformation: str
) -> dict[str, dict[str, np.ndarray]]:
    """Computes the errors of every law.

    Args:
      gathered: from `gather`.
      precision: one of `PRECISIONS`, of the law and its arguments.
      transformation: one of `TRANSFORMATIONS` of the law.

    Returns:
      Law -> witness -> error (problems,), see `check`.
    """
    cases, evidence, number = gathered
    with exact():
        said = _claims(cases, number, PRECISIONS[precision], transformation)
    dtype = PRECISIONS[precision]
    return {law: errors_of(said[law], evidence[law], number, dtype) for law in LAWS}


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Sets float64, and products in full precision also on GPUs, for this thread."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def _cast(dtype: jax.typing.DTypeLike, leaf: np.ndarray) -> jax.Array:
    floating = np.issubdtype(leaf.dtype, np.floating)
    return jnp.asarray(leaf, dtype if floating else leaf.dtype)


def _claims(
    cases: Case, number: int, dtype: jax.typing.DTypeLike, transformation: str
) -> dict[str, chex.ArrayTree]:
    """Computes every law on every case, stacked."""

    def by_hand(c: Case) -> dict[str, chex.ArrayTree]:
        return {name: claims.claim(law, c) for name, law in LAWS.items()}

    cast = functools.partial(_cast, dtype)
    if transformation in ("vmap", "both"):
        together = jax.vmap(by_hand)
        if transformation == "both":
            together = jax.jit(together)
        return jax.device_get(together(jax.tree.map(cast, cases)))
    alone = jax.jit(by_hand) if transformation == "jit" else by_hand
    said = [
        jax.device_get(alone(jax.tree.map(lambda leaf, n=n: cast(leaf[n]), cases)))
        for n in range(number)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *said)


def _evidence(problem: Problem) -> tuple[Case, dict[str, Evidence]]:
    case = reference.gather(problem)
    evidence = {}
    for variant in reference.VARIANTS:
        evidence |= _evidence_on(variant, case)
    return case, evidence


def _evidence_on(variant: str, case: Case) -> dict[str, Evidence]:
    """Gathers evidence on all laws of a variant, by one compiled forward pass."""
    of_variant = {name: law for name, law in LAWS.items() if law.variant == variant}
    at, dl = getattr(case, variant)
    upstream = dl.context if variant == "plain" else None
    rest, _ = reference.forward(case.problem, variant, {}, upstream)
    lines = {name: _line(law, case, rest) for name, law in of_variant.items()}

    # Only stages that some law shifts or reads, or far more would be compiled.
    still = {
        name: jax.tree.map(jnp.zeros_like, getattr(at, name))
        for name in sorted({name for line in lines.values() for name in line.shift})
    }
    silent = {
        name: jnp.zeros_like(getattr(rest, name))
        for name in sorted({line.output for line in lines.values()})
    }

    def forward(shift: dict[str, chex.ArrayTree]) -> dict[str, jax.Array]:
        outcome, _ = reference.forward(case.problem, variant, shift, upstream)
        return {name: getattr(outcome, name) for name in silent}

    def value(shift: dict, reading: dict, step: jax.Array) -> jax.Array:
        outcome = forward(jax.tree.map(lambda d: step * d, shift))
        return sum(jnp.vdot(reading[name], outcome[name]) for name in silent)

    steps = jnp.stack([STEPS, -STEPS])
    along_lines = jax.lax.map(
        lambda line: jax.lax.map(lambda step: value(*line, step), steps.ravel()),
        (
            _stack([still | line.shift for line in lines.values()]),
            _stack([silent | {line.output: line.reading} for line in lines.values()]),
        ),
    ).reshape(-1, *steps.shape)

    truths = {
        name: _gradient(law, case)
        for name, law in of_variant.items()
        if isinstance(law, Gradient)
    }
    if motions := {n: m for n, m in of_variant.items() if isinstance(m, Motion)}:
        shifts = _stack([still | m.shift(case, at, dl) for m in motions.values()])
        moved = jax.lax.map(
            lambda shift: jax.jvp(forward, (still,), (shift,))[1], shifts
        )
        for number, (name, motion) in enumerate(motions.items()):
            truths[name] = moved[motion.output][number]

    return {
        name: Evidence(
            truth=truths[name],
            terms=claims.terms(law, case),
            conditioning=claims.conditioning(law, case),
            probe=lines[name].probe,
            scale=lines[name].scale,
            along_line=along_lines[number],
        )
        for number, (name, law) in enumerate(of_variant.items())
    }


def _line(law: Gradient | Motion, case: Case, rest: Outcome) -> Line:
    """Draws a random line for a law."""
    at, dl = getattr(case, law.variant)
    if isinstance(law, Gradient):
        like = law.like(case, at, dl)
        scale = jax.tree.map(_typical, like)
        probe = jax.tree.map(jnp.multiply, scale, _normal(case.problem.noise, like))
        shift = law.push(case, probe)
        return Line(shift, "loss", jnp.ones_like(rest.loss), probe, scale)
    shift = law.shift(case, at, dl)
    # The largest scale at which no stage moves by more than its own size.
    fits = [
        jax.tree.map(lambda x, d: _typical(x) / _typical(d), getattr(at, name), d)
        for name, d in shift.items()
    ]
    scale = jax.tree.reduce(jnp.minimum, fits)
    shift = jax.tree.map(lambda d: scale * d, shift)
    reading = _normal(case.problem.noise, getattr(rest, law.output))
    return Line(shift, law.output, reading, scale * reading, scale)


def _gradient(law: Gradient, case: Case) -> chex.ArrayTree:
    """Computes the gradient for a law's coordinates by autodiff, by the chain rule."""
    at, dl = getattr(case, law.variant)
    nowhere = jax.tree.map(jnp.zeros_like, law.like(case, at, dl))
    shift, pull = jax.vjp(lambda direction: law.push(case, direction), nowhere)
    return pull({name: getattr(dl, name) for name in shift})[0]


def _stack(trees: list) -> chex.ArrayTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _normal(noise: jax.Array, tree: chex.ArrayTree) -> chex.ArrayTree:
    """Fills a tree with N(0, 1), from a vector of them."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = [
        noise[end - leaf.size : end].reshape(leaf.shape)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def _typical(array: jax.Array) -> jax.Array:
    """Root mean square; 1 for zeros."""
    size = jnp.sqrt(jnp.mean(array**2))
    return jnp.where(size > 0, size, 1)
