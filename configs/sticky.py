"""The sticky chain: SGD and EM on one sequence, against exact Bayes.

    python scripts/train.py --config=configs/sticky.py          # 8 seeds, 4 arms
    python scripts/train.py --config=configs/sticky.py:full     # 32 seeds, 9 arms
    python scripts/train.py --config=configs/sticky.py:online   # fresh sequences
    python scripts/train.py --config=configs/sticky.py:frame    # two time scales
    python scripts/train.py --config=configs/sticky.py:parity   # the authors' way
    python scripts/train.py --config=configs/sticky.py:smoke    # seconds

Expected (results/sticky/report.md), train loss in nats: sgd 2.055, values_fast 2.000,
em_majorised 1.919, sgd_10x 1.883; exact Bayes 1.885. KL to Bayes on a held-out
sequence: 0.177, 0.135, 0.086, 0.073.
"""

from ml_collections import ConfigDict

from jaxattn.experiments.arms import claim, em, gradient, rates
from jaxattn.experiments.config import vary

# The authors' script asks for 0.3 and applies it twice; this is what its chain does:
# 0.3 + 0.7 * 0.3 / (0.3 + 2 (1 + 1/2 + 1/3) + 1/4).
_SCRIPT_STAY = 0.3 + 0.7 * 0.3 / (0.3 + 2 * (1 + 1 / 2 + 1 / 3) + 1 / 4)

VARIANTS = {
    "full": {
        "seeds": 32,
        "run_arms": (
            "sgd",
            "values_fast",
            "em_prototype",
            "em_majorised",
            "sgd_10x",
            "output_fast",
            "routing_fast",
            "adam",
            "momentum",
        ),
    },
    # A new sequence every step; the closed form averages its bounds over about 20.
    "online": {
        "fresh": True,
        "run_arms": ("sgd", "values_fast", "em_majorised", "sgd_10x", "adam"),
        "arms.em_majorised.statistics_rate": 0.05,
    },
    # Does attention settle first, and is it the values that go on?
    "frame": {
        "seeds": 32,
        "fresh": True,
        "run_arms": ("sgd_10x", "frozen_values", "random_frame"),
        "baseline": "sgd_10x",
    },
    "smoke": {"seeds": 2, "steps": 20, "eval_every": 5, "task.length": 200},
    "parity": {
        "seeds": 5,
        "eval_every": 10,
        "run_arms": ("sgd", "values_fast"),
        "task.stay": _SCRIPT_STAY,
    },
}


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "experiment": "head",
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
                "sgd": gradient("sgd", 0.01),
                "values_fast": rates(0.01, 0.1, 0.01),
                # A value moves by the mean of its queries' signals: η = T.
                "em_prototype": em("prototype", 0.01, value_rate=2000.0, ridge=1.0),
                "em_majorised": em(
                    "majorised", 0.01, ridge=0.001, damping=1.0, statistics_rate=1.0
                ),
                # Is it EM, or just a larger rate, here or anywhere?
                "sgd_10x": gradient("sgd", 0.1),
                "output_fast": rates(0.01, 0.01, 0.1),
                "routing_fast": rates(0.1, 0.01, 0.01),
                "adam": gradient("adam", 0.001),
                "momentum": gradient("momentum", 0.01),
                # Nulls of sgd_10x: one half stays as it was drawn.
                "frozen_values": rates(0.1, 0.0, 0.1),
                "random_frame": rates(0.0, 0.1, 0.1),
            },
            # Claims of the paper, whose EM is fast values at the base rate of SGD.
            "claims": {
                "loss": claim(
                    "fast values beat SGD", "values_fast", "sgd", "train_loss"
                ),
                "kl": claim(
                    "fast values beat SGD, held out", "values_fast", "sgd", "heldout_kl"
                ),
                "loss_10x": claim(
                    "fast values beat SGD of their rate",
                    "values_fast",
                    "sgd_10x",
                    "train_loss",
                ),
                "kl_10x": claim(
                    "fast values beat SGD of their rate, held out",
                    "values_fast",
                    "sgd_10x",
                    "heldout_kl",
                ),
                "closed": claim(
                    "closed-form EM beats SGD, held out",
                    "em_majorised",
                    "sgd",
                    "heldout_kl",
                ),
                "closed_10x": claim(
                    "closed-form EM beats SGD of ten times its rate, held out",
                    "em_majorised",
                    "sgd_10x",
                    "heldout_kl",
                ),
                "sharper": claim(
                    "fast values sharpen attention more than SGD",
                    "values_fast",
                    "sgd",
                    "attention_entropy",
                ),
                "sharper_10x": claim(
                    "fast values sharpen attention more than SGD of their rate",
                    "values_fast",
                    "sgd_10x",
                    "attention_entropy",
                ),
            },
            "run_arms": ("sgd", "values_fast", "em_majorised", "sgd_10x"),
            "baseline": "sgd",  # what the other arms are compared with
        }
    )
    vary(config, VARIANTS, variant)
    return config
