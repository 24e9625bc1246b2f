"""Relative errors of claims, and slopes by central differences."""

from typing import NamedTuple

import chex
import jax
import numpy as np

WITNESSES = ("autodiff", "difference")

# Terms that cancel to less than this share of their size leave rounding in float32: the
# error is relative to the terms then, and the problem does not test the law.
CANCELLATION = 0.01
# A slope smaller than this times the value is within the value's rounding.
FINEST_SLOPE = 1e-6

# Central differences at h = 0.1 * 4^-k of a point's own size: the best h for scores of
# size 1 to that for scores of size 1e4.
STEPS = 0.1 * 4.0 ** -np.arange(15)


class Evidence(NamedTuple):
    """What a claim is compared with."""

    truth: chex.ArrayTree  # by autodiff
    terms: chex.ArrayTree  # sizes of the terms that are summed
    conditioning: jax.Array  # factor of the allowed error
    probe: chex.ArrayTree  # ⟨probe, claim⟩ is a slope along a line
    scale: chex.ArrayTree  # typical size of the probe, leaf by leaf
    along_line: jax.Array  # the outcome on it, at + and - the steps (2, K)


def errors_of(
    claim: chex.ArrayTree, evidence: Evidence, number: int, dtype: jax.typing.DTypeLike
) -> dict[str, np.ndarray]:
    """Computes the errors of a law's claims, one per problem, by witness."""
    if not _is_like(claim, evidence.truth, dtype):
        return {witness: np.full(number, np.inf) for witness in WITNESSES}

    def norms(tree: chex.ArrayTree) -> np.ndarray:
        return norms_of(tree, number)

    def scaled(tree: chex.ArrayTree) -> chex.ArrayTree:
        return jax.tree.map(
            lambda s, x: s.reshape(number, *[1] * (x.ndim - 1)) * x,
            evidence.scale,
            tree,
        )

    gaps = norms(jax.tree.map(np.subtract, claim, evidence.truth))
    sizes = np.maximum(norms(evidence.truth), CANCELLATION * norms(evidence.terms))
    distance = relative(gaps, sizes).max(axis=1)

    products = jax.tree.map(np.multiply, claim, evidence.probe)
    slope = sum(x.reshape(number, -1).sum(axis=1) for x in jax.tree.leaves(products))
    gap = np.abs(slope - extrapolated_slope(evidence.along_line))
    size = np.maximum(
        norms(scaled(evidence.truth)), CANCELLATION * norms(scaled(evidence.terms))
    )
    finest = FINEST_SLOPE * np.abs(evidence.along_line).min(axis=(1, 2))
    size = np.maximum(np.sqrt(np.sum(size**2, axis=1)), finest)
    return {
        "autodiff": distance / evidence.conditioning,
        "difference": relative(gap, size) / evidence.conditioning,
    }


def _is_like(
    claim: chex.ArrayTree, truth: chex.ArrayTree, dtype: jax.typing.DTypeLike
) -> bool:
    """Whether a claim has the structure and shapes of the truth, and this dtype."""
    if jax.tree.structure(claim) != jax.tree.structure(truth):
        return False
    pairs = zip(jax.tree.leaves(claim), jax.tree.leaves(truth), strict=True)
    return all(said.shape == true.shape and said.dtype == dtype for said, true in pairs)


def norms_of(tree: chex.ArrayTree, number: int) -> np.ndarray:
    """Computes norms of each array of a tree, for each problem (number, arrays)."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.sqrt([np.sum(x.reshape(number, -1) ** 2, axis=1) for x in leaves]).T


def relative(error: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Divides; 0 / 0 is no error, and anything not finite is an infinite one."""
    ratio = np.where(error > 0, np.inf, 0.0)
    np.divide(error, size, out=ratio, where=size > 0)
    return np.where(np.isfinite(ratio) & np.isfinite(size), ratio, np.inf)


def extrapolated_slope(along_line: np.ndarray) -> np.ndarray:
    """Computes slopes from central differences, extrapolated to step 0.

    Selects the step and order that agree best with their neighbours, independent of the
    claim to be tested.

    Args:
      along_line: values at ± the steps (N, 2, K).

    Returns:
      (N,).

    Source: Ridders 1982, Advances in Engineering Software 4(2).
    """
    order = (along_line[:, 0] - along_line[:, 1]) / (2 * STEPS)
    value = np.abs(along_line).max(axis=(1, 2))[:, None]
    rounding = np.finfo(np.float64).eps * value / STEPS
    best, doubt = order[:, 0], np.full(len(order), np.inf)
    for power in range(1, len(STEPS)):
        shrink = (STEPS[0] / STEPS[1]) ** (2 * power)
        coarse, fine = order[:, :-1], order[:, 1:]
        higher = (shrink * fine - coarse) / (shrink - 1)
        spread = np.maximum(np.abs(higher - fine), np.abs(higher - coarse))
        # Agreement of two that are far from the coarser ones is accidental.
        spread += 1e-4 * np.abs(fine - coarse) + rounding[:, power:]
        column = np.argmin(spread, axis=1)[:, None]
        smallest = np.take_along_axis(spread, column, 1)[:, 0]
        candidate = np.take_along_axis(higher, column, 1)[:, 0]
        best = np.where(smallest < doubt, candidate, best)
        doubt = np.minimum(doubt, smallest)
        order = higher
    return best
