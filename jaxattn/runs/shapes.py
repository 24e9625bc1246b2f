"""What the JSON files of a run must have, see `misfit`: readers check no more."""

from typing import Any

from jaxattn.runs.json_files import misfit

_NUMBER = (int, float)
_NONE = type(None)
_NO_OTHER = frozenset()
_ESTIMATE = {"mean": (_NONE, *_NUMBER), "ci95": (_NONE, [_NUMBER, _NUMBER])}
_CLAIM = {
    **dict.fromkeys(("text", "arm", "baseline", "metric"), str),
    **{"direction": frozenset({"less", "more"}), ...: _NO_OTHER},
}
_POINT = {"fresh": bool, "ratio": _NUMBER, "scale": _NUMBER, ...: _NO_OTHER}
# Of every run.
SHAPES = {
    "config.json": {
        "config": {
            **{"name": str, "steps": int, "seeds": int, "run_arms": [str]},
            **{"arms": {...: {}}, "task": {"name": str}},
        },
        "facts": {
            "view": str,
            "task": {
                **{"num_classes": range(1, 2**63), "entropy_rate": (_NONE, *_NUMBER)},
                **{"learned": str, "shown": frozenset({"heldout", "train"})},
                **{"lag": int, "note": str, "causal": bool, "positions": int},
            },
            "measures": {...: {"about": str, "unit": str, "null": bool}},
            "claims": [_CLAIM],
        },
        **{"versions": {...: str}, "device": {}},
    },
    "metrics.json": {
        "axes": {...: [str]},
        "coordinates": {
            **{"arm": [str], "seed": [int], "eval": [int]},
            ...: ([(*_NUMBER, str)], [_POINT]),
        },
    },
    "summary.json": {
        **{"config": str, "steps": int, "seeds": int},
        "wall_seconds": {"compile": _NUMBER, "run": _NUMBER},
        "arms": {
            ...: dict.fromkeys(
                ("train_loss", "heldout_loss", "heldout_kl", "accuracy"), _ESTIMATE
            )
        },
    },
}
# What each view reads beside it.
_OF_VIEW = {
    "head": {
        "config.json": {
            "config": {"baseline": str, "fresh": bool},
            "facts": {"diagnosed_positions": int},
        }
    },
    "grid": {
        "config.json": {
            "config": {
                "grid": {
                    **{"fresh": [bool], "ratio": [_NUMBER], "scale": [_NUMBER]},
                    "threshold": _NUMBER,
                }
            },
            "facts": {"splits_by_ratio": [str]},
        },
        "metrics.json": {"coordinates": {"point": [_POINT]}},
    },
    "transformer": {
        "config.json": {
            "config": {
                **{"baseline": str, "fresh": bool, "model": {}},
                "eval_length_factor": _NUMBER,
            },
            "facts": {
                "task": {"scored": int, "position_name": str, "longer": (_NONE, str)},
                "architectures": {...: {"kind": str, "depth": int, "heads": int}},
            },
        }
    },
}


def misfit_of_view(name: str, content: dict[str, Any], view: str) -> str:
    """Says what of a file its view could not read; empty if there is nothing.

    Args:
      name: of the file.
      content: of the shape that it has in every run.
      view: that the run asks for; of one that is not known here nothing is asked.
    """
    return misfit(content, _OF_VIEW.get(view, {}).get(name, {}))


def contradiction(record: dict[str, Any]) -> str:
    """Says which arm that ran a config.json lacks elsewhere; empty if none."""
    config, facts = record["config"], record["facts"]
    places = {"arms": config["arms"], "architectures": facts.get("architectures")}
    for arm in config["run_arms"]:
        for name, known in places.items():
            if isinstance(known, dict) and arm not in known:
                return f"{name} has no {arm!r}, which ran"
    baseline = config.get("baseline")
    if baseline is not None and baseline not in config["run_arms"]:
        return f"its baseline {baseline!r} did not run"
    return ""
