"""What an arm of transformers says of the companion paper's claims."""

from typing import Any, NamedTuple

import numpy as np

from jaxattn.analysis import claims, entries, stats
from jaxattn.analysis.layer_curves import GEOMETRY, model_field, of_layers
from jaxattn.runs import Run

_LEAST_DAMAGE = 0.1  # of the KL with all in place, below which parts say nothing


class Finding(NamedTuple):
    """One of the companion paper's claims, asked of an arm."""

    claim: str
    what: str  # is compared
    differences: tuple[np.ndarray, ...]  # (seed,), all below 0 where it holds


def findings_of(run: Run, row: int) -> list[Finding]:
    """What an arm says of the companion paper's claims; those it cannot are left out.

    A claim needs more than its number: keys more orthogonal than they were before
    training, and than random ones; values ordered by entropy more than by position.

    Args:
      run: from `finite_alone`.
      row: of an arm with attention.
    """
    last = {
        name: of_layers(run, row, name)[:, -1]
        for question, nulls in GEOMETRY.items()
        for name in (question, *(f"{question}_{null}" for null in nulls))
    }
    first = {name: of_layers(run, row, name)[:, 0] for name in GEOMETRY}
    keys, entropy = last["key_orthogonality"], last["relative_entropy"]
    found = [
        Finding(
            "keys become orthogonal axes (layer 1)",
            "mean abs. cosine at the end, less before training, less random keys",
            (
                keys[:, 0] - first["key_orthogonality"][:, 0],
                keys[:, 0] - last["key_orthogonality_random"][:, 0],
            ),
        ),
        Finding(
            "values are ordered by posterior entropy (last layer)",
            "rank correlation before training, along a random direction, with another"
            " sequence's entropies; each less what was found",
            tuple(
                null[:, -1] - last["entropy_axis"][:, -1]
                for null in (
                    first["entropy_axis"],
                    last["entropy_axis_random"],
                    last["entropy_axis_permuted"],
                )
            ),
        ),
        Finding(
            "values are ordered by entropy within a position (last layer)",
            "the same, of what is left when each position's mean is taken away",
            tuple(
                null[:, -1] - last["entropy_axis_within"][:, -1]
                for null in (
                    first["entropy_axis_within"],
                    last["entropy_axis_within_random"],
                    last["entropy_axis_within_permuted"],
                )
            ),
        ),
        Finding(
            "the stream holds the belief (after the last layer)",
            "R² before training, of permuted beliefs; less what was found",
            (
                first["belief_read_out"][:, -1] - last["belief_read_out"][:, -1],
                last["belief_read_out_permuted"][:, -1]
                - last["belief_read_out"][:, -1],
            ),
        ),
    ]
    if entropy.shape[1] > 1:
        steeper = entropy[:, -1] - entropy[:, 0]
        before = first["relative_entropy"][:, -1] - first["relative_entropy"][:, 0]
        sharpening = Finding(
            "attention sharpens with depth",
            "relative entropy of the last layer less the first; that less before",
            (steeper, steeper - before),
        )
        found.insert(1, sharpening)
    shares = largest_shares(run, row)
    if shares is not None:
        found.append(
            Finding(
                "heads share the work",
                "the most that one head's absence costs, as a share of what that of all"
                " heads of its layer does; less a half",
                (shares - 0.5,),
            )
        )
    return [a for a in found if all(np.isfinite(d).any() for d in a.differences)]


def largest_shares(run: Run, row: int) -> np.ndarray | None:
    """The largest share of its layer's work that one head does, over layers, (seed,).

    What its absence costs over what that of all heads of the layer costs, each replaced
    by its mean. A layer whose heads cost next to nothing says nothing.

    Args:
      run: from `finite_alone`.
      row: of an arm with attention.

    Returns:
      About 1 where one head does all, 1/H where H do as much each, about 0 where any
      can stand in for another; NaN of seeds that say nothing; None of single heads.
    """
    heads = model_field(run, row, "heads")
    if heads < 2:
        return None
    depth = model_field(run, row, "depth")
    base = run["heldout_kl_bits"].values[row, :, -1]
    single = run["head_averaged_kl_bits"].values[row, :, :depth, :heads]
    together = run["heads_averaged_kl_bits"].values[row, :, :depth] - base[:, None]
    single = np.maximum(single - base[:, None, None], 0).max(axis=2)
    says = together > _LEAST_DAMAGE * base[:, None]
    share = np.where(says, single / np.where(says, together, 1), -np.inf).max(axis=1)
    return np.where(np.isfinite(share), share, np.nan)


def judged_entry(answer: Finding) -> dict[str, Any]:
    """A finding as it stands in summary.json, with its verdict."""
    zeros = np.zeros_like(answer.differences[0])
    # All are between shares or cosines, numbers of about 1.
    found = [
        stats.paired_difference(d, zeros)._replace(rounding=stats.ROUNDING)
        for d in answer.differences
    ]
    signs = {stats.sign(difference) for difference in found}
    verdict = signs.pop() if len(signs) == 1 else 0
    return {
        "claim": answer.claim,
        "what": answer.what,
        "differences": [entries.difference_entry(d) for d in found],
        "verdict": claims.VERDICTS[verdict],
    }
