"""Bijection elimination: which value is left, when every pair is seen but once.

python scripts/train.py --config=configs/bijection.py         # 4 seeds, 3 arms
python scripts/train.py --config=configs/bijection.py:parts   # what each part does
python scripts/train.py --config=configs/bijection.py:paper   # for a GPU
python scripts/train.py --config=configs/bijection.py:smoke   # seconds
"""

from ml_collections import ConfigDict

from jaxattn.config import vary

VARIANTS = {
    "smoke": {
        "seeds": 2,
        "steps": 20,
        "eval_every": 10,
        "batch_size": 8,
        "heldout": 16,
        "probe": 4,
    },
    "paper": {
        "task.num_symbols": 20,
        "task.num_pairs": 20,
        "model.depth": 6,
        "model.heads": 6,
        "model.kv_heads": 6,
        "model.width": 192,
        "model.d_head": 32,
        "model.mlp_width": 768,
        "steps": 150_000,
        "eval_every": 5000,
        "arms.mlp.mlp_width": 1155,
        "arms.history_mlp.mlp_width": 265,
        "arms.gru.width": 260,
    },
}


def _adamw(**model) -> dict:
    return {
        "schedule": "gradient",
        "optimizer": "adamw",
        "learning_rate": 0.001,
        "weight_decay": 0.01,
        "warm_up": 0.05,
        **model,
    }


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "seeds": 4,
            "seed": 0,  # root of every random key
            "steps": 5000,
            "eval_every": 250,
            "batch_size": 64,
            "fresh": True,
            "heldout": 256,  # sequences that judge
            "probe": 32,  # of them, on which heads are looked at
            "stretch": 1.0,  # there are no more keys than symbols
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
                "positions": "learned",
                "bias": False,
            },
            "task": {"name": "bijection", "num_symbols": 8, "num_pairs": 8},
            "arms": {
                "transformer": _adamw(),
                # Baselines of as many parameters.
                "mlp": _adamw(kind="mlp", mlp_width=384),
                "history_mlp": _adamw(kind="history_mlp", mlp_width=80),
                "gru": _adamw(kind="gru", width=88),
            },
            "run_arms": ("transformer", "mlp", "history_mlp", "gru"),
            "baseline": "transformer",
        }
    )
    vary(config, VARIANTS, variant)
    return config
