"""The sticky chain: SGD and EM on one sequence, against exact Bayes.

    python scripts/train.py --config=configs/sticky.py          # 8 seeds, 4 arms
    python scripts/train.py --config=configs/sticky.py:full     # 32 seeds, 9 arms
    python scripts/train.py --config=configs/sticky.py:online   # fresh sequences
    python scripts/train.py --config=configs/sticky.py:frame    # two time scales
    python scripts/train.py --config=configs/sticky.py:parity   # the authors' way
    python scripts/train.py --config=configs/sticky.py:smoke    # seconds

Expected (results/sticky/report.md), train loss in nats: sgd 2.055, em 2.000,
em_majorised 1.919, sgd_matched 1.883; exact Bayes 1.885. KL to Bayes on a held-out
sequence: 0.177, 0.135, 0.086, 0.073.
"""

from ml_collections import ConfigDict

from jaxattn.experiments.config import vary

# The authors' script asks for 0.3 and applies it twice; this is what its chain does:
# 0.3 + 0.7 * 0.3 / (0.3 + 2 (1 + 1/2 + 1/3) + 1/4).
_SCRIPT_STAY = 0.3 + 0.7 * 0.3 / (0.3 + 2 * (1 + 1 / 2 + 1 / 3) + 1 / 4)

VARIANTS = {
    "full": {
        "seeds": 32,
        "run_arms": (
            "sgd",
            "em",
            "em_prototype",
            "em_majorised",
            "sgd_matched",
            "output_fast",
            "routing_fast",
            "adam",
            "momentum",
        ),
    },
    # A new sequence every step; the closed form averages its bounds over about 20.
    "online": {
        "fresh": True,
        "run_arms": ("sgd", "em", "em_majorised", "sgd_matched", "adam"),
        "arms.em_majorised.statistics_rate": 0.05,
    },
    # Does attention settle first, and is it the values that go on?
    "frame": {
        "seeds": 32,
        "fresh": True,
        "run_arms": ("sgd_matched", "frozen_values", "random_frame"),
        "baseline": "sgd_matched",
    },
    "smoke": {"seeds": 2, "steps": 20, "eval_every": 5, "task.length": 200},
    "parity": {
        "seeds": 5,
        "eval_every": 10,
        "run_arms": ("sgd", "em"),
        "task.stay": _SCRIPT_STAY,
    },
}


def _gradient(optimizer: str, learning_rate: float) -> dict:
    return {
        "schedule": "gradient",
        "optimizer": optimizer,
        "learning_rate": learning_rate,
    }


def _rates(routing: float = 0.01, value: float = 0.01, output: float = 0.01) -> dict:
    return {
        "schedule": "two_timescale",
        "routing_rate": routing,
        "value_rate": value,
        "output_rate": output,
    }


def _em(m_step: str, **values: float) -> dict:
    return {
        "schedule": "em",
        "optimizer": "sgd",
        "m_step": m_step,
        "order": "alternating",
        "inner_steps": 1,
        "routing_rate": 0.01,
        "output_rate": 0.01,
        **values,
    }


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "seeds": 8,
            "seed": 0,  # root of every random key
            "steps": 1000,
            "eval_every": 20,
            "batch_size": 1,  # sequences per step
            "fresh": False,  # a new sequence every step, or always the same
            "gradient": "streaming",  # or "laws" of one head, or "autodiff"
            "snapshot_seeds": (0,),  # whose attention and values are kept
            "snapshots": 26,  # at how many evaluations, from the first to the last
            "snapshot_length": 48,  # at how many positions
            "diagnostics_length": 256,  # and of how many other diagnostics are
            "model": {"d_k": 10, "d_v": 15, "init_scale": 0.1, "bias": False},
            "task": {
                "name": "sticky",
                "length": 2000,
                "num_symbols": 8,
                "d_x": 20,
                "stay": 0.3,
                "embedding_seed": 0,  # -1: other embeddings for each seed
            },
            "arms": {
                "sgd": _gradient("sgd", 0.01),
                "em": _rates(value=0.1),
                # A value moves by the mean of its queries' signals: η = T.
                "em_prototype": _em("prototype", value_rate=2000.0, ridge=1.0),
                "em_majorised": _em(
                    "majorised", ridge=0.001, damping=1.0, statistics_rate=1.0
                ),
                # Is it EM, or just a larger rate, here or anywhere?
                "sgd_matched": _gradient("sgd", 0.1),
                "output_fast": _rates(output=0.1),
                "routing_fast": _rates(routing=0.1),
                "adam": _gradient("adam", 0.001),
                "momentum": _gradient("momentum", 0.01),
                # Nulls of sgd_matched: one half stays as it was drawn.
                "frozen_values": _rates(routing=0.1, value=0.0, output=0.1),
                "random_frame": _rates(routing=0.0, value=0.1, output=0.1),
            },
            "run_arms": ("sgd", "em", "em_majorised", "sgd_matched"),
            "baseline": "sgd",  # what the other arms are compared with
        }
    )
    vary(config, VARIANTS, variant)
    return config
