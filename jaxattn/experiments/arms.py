"""Arms as configs write them: fields of each algorithm to start from."""

from typing import Any

Arm = dict[str, Any]


def gradient(optimizer: str, learning_rate: float, **fields: Any) -> Arm:
    """Moves everything by one optimizer."""
    return {
        "algorithm": "gradient",
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        **fields,
    }


def adamw(learning_rate: float, **fields: Any) -> Arm:
    """Moves everything by AdamW, with 5 % of warm-up and then a half cosine."""
    own = {"weight_decay": 0.01, "warm_up": 0.05}
    return gradient("adamw", learning_rate, **(own | fields))


def rates(routing: float, value: float, output: float, **fields: Any) -> Arm:
    """Moves queries and keys, values, and the rest by SGD, at a rate each."""
    return {
        "algorithm": "two_timescale",
        "routing_rate": routing,
        "value_rate": value,
        "output_rate": output,
        **fields,
    }


def em(m_step: str, rate: float, *, inner_steps: int = 1, **fields: Any) -> Arm:
    """Moves values by an M-step with attention fixed, then the rest by SGD."""
    return {
        "algorithm": "em",
        "optimizer": "sgd",
        "m_step": m_step,
        "order": "alternating",
        "inner_steps": inner_steps,
        "routing_rate": rate,
        "output_rate": rate,
        **fields,
    }


def claim(
    text: str, arm: str, baseline: str, metric: str, direction: str = "less"
) -> dict[str, str]:
    """States that an arm has less, or more, of a metric than another.

    Args:
      text: the claim in words.
      arm: that it is about.
      baseline: that it is compared with.
      metric: of the last evaluation, such as "heldout_kl".
      direction: "less" or "more".
    """
    return {
        "text": text,
        "arm": arm,
        "baseline": baseline,
        "metric": metric,
        "direction": direction,
    }
