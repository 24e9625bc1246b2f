"""The toy: a handful of random inputs and labels, learned by heart in 100 steps.

python scripts/train.py --config=configs/toy.py         # 12 seeds, 8 arms
python scripts/train.py --config=configs/toy.py:smoke   # seconds

Expected (results/toy/report.md), sgd: the entropy of attention falls from 0.75 of what
it could be to 0.34; 0.77 of the values' motion is along two axes, of random walks in
the read-out's span 0.69; the loss rises at 0.2 of 50 evaluations.
"""

from ml_collections import ConfigDict

from jaxattn.experiments.arms import claim, rates
from jaxattn.experiments.config import vary

VARIANTS = {
    "smoke": {"seeds": 2, "steps": 20, "run_arms": ("sgd", "layer_norm", "dropout")},
}


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "experiment": "head",
            "seeds": 12,
            "seed": 0,  # root of every random key
            "steps": 100,
            "eval_every": 2,
            "batch_size": 1,
            "fresh": False,  # always the same sequence
            "gradient": "streaming",
            "snapshot_seeds": (0,),  # whose attention and values are kept
            "snapshots": 26,  # at how many evaluations, from the first to the last
            "snapshot_length": 16,  # at how many positions; here all, as where a head
            "diagnostics_length": 16,  # looks everywhere others could not be left out
            "model": {"d_k": 8, "d_v": 8, "init_scale": 0.3, "bias": False},
            "task": {"name": "toy", "length": 16, "num_classes": 8, "d_x": 16},
            "arms": {
                "sgd": rates(0.1, 0.1, 0.1),
                "values_fast": rates(0.1, 1.0, 0.1),
                # One thing at a time, beside sgd.
                "layer_norm": rates(0.1, 0.1, 0.1, value_norm=True),
                "dropout": rates(0.1, 0.1, 0.1, dropout_rate=0.2),
                "sgd_3x": rates(0.3, 0.3, 0.3),
                "routing_fast": rates(1.0, 0.1, 0.1),
                # Nulls: one half stays as it was drawn, the other learns.
                "frozen_values": rates(0.1, 0.0, 0.1),
                "random_frame": rates(0.0, 0.1, 0.1),
            },
            "claims": {
                "loss": claim(
                    "fast values beat SGD", "values_fast", "sgd", "train_loss"
                ),
                "sharper": claim(
                    "fast values sharpen attention more than SGD",
                    "values_fast",
                    "sgd",
                    "train_attention_entropy",
                ),
            },
            "run_arms": (
                "sgd",
                "values_fast",
                "layer_norm",
                "dropout",
                "sgd_3x",
                "routing_fast",
                "frozen_values",
                "random_frame",
            ),
            "baseline": "sgd",  # what the other arms are compared with
        }
    )
    vary(config, VARIANTS, variant)
    return config
