"""Bijection elimination: which value is left, when every pair is seen but once.

python scripts/train.py --config=configs/bijection.py           # 6 seeds, 3 arms
python scripts/train.py --config=configs/bijection.py:parts     # what each part does
python scripts/train.py --config=configs/bijection.py:schedules # not adamw
python scripts/train.py --config=configs/bijection.py:paper     # for a GPU
python scripts/train.py --config=configs/bijection.py:smoke     # seconds

Expected (results/bijection/report.md): KL to Bayes 0.0038 bits, of an MLP that sees all
positions so far 0.0037, of one that sees its own alone 1.09.
"""

from ml_collections import ConfigDict

from jaxattn.experiments.config import vary

VARIANTS = {
    "smoke": {
        "seeds": 2,
        "steps": 20,
        "eval_every": 10,
        "batch_size": 8,
        "heldout": 16,
        "probe": 4,
        "run_arms": ("transformer", "mlp"),
    },
    # One thing at a time.
    "parts": {
        "seeds": 4,
        "steps": 2000,
        "run_arms": (
            *("transformer", "shallow", "one_head", "shared_keys", "no_mlp"),
            *("no_residual", "no_norm", "post_norm", "value_norm", "dropout", "gru"),
        ),
    },
    "schedules": {
        "seeds": 4,
        "steps": 2000,
        "run_arms": ("sgd", "values_fast", "em", "sgd_matched", "output_fast"),
        "baseline": "sgd",
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
        "arms.gru.width": 271,
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


def _rates(routing: float = 0.1, value: float = 0.1, output: float = 0.1) -> dict:
    return {
        "schedule": "two_timescale",
        "routing_rate": routing,
        "value_rate": value,
        "output_rate": output,
    }


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "seeds": 6,
            "seed": 0,  # root of every random key
            "steps": 4000,
            "eval_every": 100,
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
                "gru": _adamw(kind="gru", width=91, positions="none"),
                # The transformer with one thing changed.
                "shallow": _adamw(depth=1),
                "one_head": _adamw(heads=1, kv_heads=1, d_head=64),
                "shared_keys": _adamw(kv_heads=1),
                "no_mlp": _adamw(mlp_width=0),
                "no_residual": _adamw(residual=False),
                "no_norm": _adamw(norm="none"),
                "post_norm": _adamw(norm="post"),
                "value_norm": _adamw(value_norm=True),
                "dropout": _adamw(dropout_rate=0.1),
                # Other schedules, on every layer.
                "sgd": _rates(),
                "values_fast": _rates(value=1.0),
                # Is it the values, or just a larger rate, here or anywhere?
                "sgd_matched": _rates(1.0, 1.0, 1.0),
                "output_fast": _rates(output=1.0),
                "em": _rates(value=1.0)
                | {
                    "schedule": "em",
                    "optimizer": "sgd",
                    "m_step": "gradient",
                    "order": "alternating",
                    "inner_steps": 1,
                },
            },
            # What an MLP sees of the past is a control: is it attention, or the past?
            "run_arms": ("transformer", "mlp", "history_mlp"),
            "baseline": "transformer",
        }
    )
    vary(config, VARIANTS, variant)
    return config
