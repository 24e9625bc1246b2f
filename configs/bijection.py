"""Bijection elimination: which value is left, when every pair is seen but once.

python scripts/train.py --config=configs/bijection.py           # 6 seeds, 3 arms
python scripts/train.py --config=configs/bijection.py:parts     # what each part does
python scripts/train.py --config=configs/bijection.py:algorithms  # not adamw
python scripts/train.py --config=configs/bijection.py:paper     # for a GPU
python scripts/train.py --config=configs/bijection.py:smoke     # seconds

Expected (results/bijection/report.md): KL to Bayes 0.0038 bits, of an MLP that sees all
positions so far 0.0037, of one that sees its own alone 1.09.
"""

from ml_collections import ConfigDict

from jaxattn.experiments.arms import adamw, claim, em, rates
from jaxattn.experiments.config import vary

VARIANTS = {
    "smoke": {
        "seeds": 2,
        "steps": 20,
        "eval_every": 10,
        "batch_size": 8,
        "heldout": 16,
        "analysed_sequences": 4,
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
    "algorithms": {
        "seeds": 4,
        "steps": 2000,
        "run_arms": ("sgd", "values_fast", "em", "sgd_10x", "output_fast"),
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


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "experiment": "transformer",
            "seeds": 6,
            "seed": 0,  # root of every random key
            "steps": 4000,
            "eval_every": 100,
            "batch_size": 64,
            "fresh": True,
            "heldout": 256,  # sequences to evaluate on
            "analysed_sequences": 32,  # of them, on which heads are analysed
            "eval_length_factor": 1.0,  # there are no more keys than symbols
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
                "transformer": adamw(0.001),
                # Baselines of as many parameters.
                "mlp": adamw(0.001, kind="mlp", mlp_width=384),
                "history_mlp": adamw(0.001, kind="history_mlp", mlp_width=80),
                "gru": adamw(0.001, kind="gru", width=91, positions="none"),
                # The transformer with one thing changed.
                "shallow": adamw(0.001, depth=1),
                "one_head": adamw(0.001, heads=1, kv_heads=1, d_head=64),
                "shared_keys": adamw(0.001, kv_heads=1),
                "no_mlp": adamw(0.001, mlp_width=0),
                "no_residual": adamw(0.001, residual=False),
                "no_norm": adamw(0.001, norm="none"),
                "post_norm": adamw(0.001, norm="post"),
                "value_norm": adamw(0.001, value_norm=True),
                "dropout": adamw(0.001, dropout_rate=0.1),
                # Other algorithms, on every layer.
                "sgd": rates(0.1, 0.1, 0.1),
                "values_fast": rates(0.1, 1.0, 0.1),
                # Is it the values, or just a larger rate, here or anywhere?
                "sgd_10x": rates(1.0, 1.0, 1.0),
                "output_fast": rates(0.1, 0.1, 1.0),
                "em": em("gradient", 0.1, value_rate=1.0),
            },
            "claims": {
                "loss": claim("EM beats SGD", "em", "sgd", "train_loss"),
                "kl": claim("EM beats SGD, held out", "em", "sgd", "heldout_kl"),
                "loss_10x": claim(
                    "EM beats SGD of its rate", "em", "sgd_10x", "train_loss"
                ),
                "kl_10x": claim(
                    "EM beats SGD of its rate, held out", "em", "sgd_10x", "heldout_kl"
                ),
                "sharper": claim(
                    "EM sharpens attention more than SGD",
                    "em",
                    "sgd",
                    "attention_entropy",
                ),
                "sharper_10x": claim(
                    "EM sharpens attention more than SGD of its rate",
                    "em",
                    "sgd_10x",
                    "attention_entropy",
                ),
            },
            # What an MLP sees of the past is a control: is it attention, or the past?
            "run_arms": ("transformer", "mlp", "history_mlp"),
            "baseline": "transformer",
        }
    )
    vary(config, VARIANTS, variant)
    return config
