"""Associative recall: look up the value that was shown with a key.

python scripts/train.py --config=configs/recall.py         # 6 seeds, 3 arms
python scripts/train.py --config=configs/recall.py:paper   # for a GPU
python scripts/train.py --config=configs/recall.py:smoke   # seconds
"""

from ml_collections import ConfigDict

from jaxattn.experiments.arms import adamw
from jaxattn.experiments.config import vary

VARIANTS = {
    "smoke": {
        "seeds": 2,
        "steps": 20,
        "eval_every": 10,
        "batch_size": 8,
        "heldout": 16,
        "analysed_sequences": 4,
        "run_arms": ("transformer", "gru"),
    },
    "paper": {
        "task.num_keys": 64,
        "task.num_values": 64,
        "task.num_pairs": 24,
        "task.num_queries": 8,
        "task.filler": 16,
        "model.depth": 6,
        "model.heads": 6,
        "model.kv_heads": 6,
        "model.width": 192,
        "model.d_head": 32,
        "model.mlp_width": 768,
        "steps": 100_000,
        "eval_every": 5000,
        "arms.mlp.mlp_width": 1155,
        "arms.gru.width": 271,
    },
}


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "experiment": "transformer",
            "seeds": 6,
            "seed": 0,  # root of every random key
            "steps": 3000,
            "eval_every": 200,
            "batch_size": 64,
            "fresh": True,
            "heldout": 256,  # sequences to evaluate on
            "analysed_sequences": 32,  # of them, on which heads are analysed
            "eval_length_factor": 2.0,  # longest evaluated over trained
            "model": {
                "kind": "transformer",
                "depth": 2,
                "width": 64,
                "heads": 4,
                "kv_heads": 4,
                "d_head": 16,
                "mlp_width": 256,
                "residual": True,
                "norm": "pre",
                "positions": "rotary",
                "bias": False,
            },
            "task": {
                "name": "recall",
                "num_keys": 12,
                "num_values": 8,
                "num_pairs": 5,
                "num_queries": 3,
                "filler": 4,
                "novel": 0.2,  # share of queries for a key that was not shown
            },
            "arms": {
                "transformer": adamw(0.001),
                # Baselines of as many parameters.
                "mlp": adamw(0.001, kind="mlp", mlp_width=384, positions="learned"),
                "gru": adamw(0.001, kind="gru", width=91, positions="none"),
            },
            "run_arms": ("transformer", "mlp", "gru"),
            "baseline": "transformer",
        }
    )
    vary(config, VARIANTS, variant)
    return config
