"""HMM filtering: exact beliefs about a hidden state, under rules that a header spells.

python scripts/train.py --config=configs/hmm.py         # 6 seeds, 2 arms
python scripts/train.py --config=configs/hmm.py:parts   # what each part does
python scripts/train.py --config=configs/hmm.py:mess3   # one known process
python scripts/train.py --config=configs/hmm.py:paper   # for a GPU
python scripts/train.py --config=configs/hmm.py:smoke   # seconds

Expected (results/hmm/report.md): KL to Bayes 0.0058 bits, at 1.5 and 2.5 times the
observations 0.016 and 0.053; of a GRU of its size 0.38.
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
    # One thing at a time.
    "parts": {
        "seeds": 3,
        "steps": 1500,
        "run_arms": (
            *("transformer", "shallow", "no_residual", "no_norm", "dropout"),
            *("learned", "rotary"),
        ),
    },
    # Next-symbol prediction of Shai et al. 2024.
    "mess3": {
        "task": {"name": "fixed_hmm", "process": "mess3", "length": 16},
        "steps": 2000,
    },
    "paper": {
        "task.num_states": 5,
        "task.num_symbols": 5,
        "task.num_observations": 20,
        "model.depth": 9,
        "model.heads": 8,
        "model.kv_heads": 8,
        "model.width": 256,
        "model.d_head": 32,
        "model.mlp_width": 1024,
        "steps": 100_000,
        "eval_every": 5000,
        "arms.mlp.mlp_width": 1535,
        "arms.gru.width": 360,
    },
}


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "experiment": "transformer",
            "seeds": 6,
            "seed": 0,  # root of every random key
            "steps": 2200,
            "eval_every": 100,
            "batch_size": 64,
            "fresh": True,
            "heldout": 256,  # sequences to evaluate on
            "analysed_sequences": 16,  # of them, on which heads are analysed
            "eval_length_factor": 2.5,  # longest evaluated over trained
            "model": {
                "kind": "transformer",
                "depth": 3,
                "width": 64,
                "heads": 4,
                "kv_heads": 4,
                "d_head": 16,
                "mlp_width": 256,
                "residual": True,
                "norm": "pre",
                # Where the header says what, and how long ago an observation was.
                "positions": "learned_rotary",
                "bias": False,
            },
            "task": {
                "name": "hmm",
                "num_states": 3,
                "num_symbols": 3,
                "num_observations": 12,
            },
            "arms": {
                "transformer": adamw(0.003),
                # Baselines of as many parameters.
                "mlp": adamw(0.003, kind="mlp", mlp_width=384, positions="learned"),
                "gru": adamw(0.003, kind="gru", width=91, positions="none"),
                # The transformer with one thing changed.
                "shallow": adamw(0.003, depth=1),
                "no_mlp": adamw(0.003, mlp_width=0),
                "no_residual": adamw(0.003, residual=False),
                "no_norm": adamw(0.003, norm="none"),
                "value_norm": adamw(0.003, value_norm=True),
                "dropout": adamw(0.003, dropout_rate=0.1),
                "learned": adamw(0.003, positions="learned"),
                "rotary": adamw(0.003, positions="rotary"),
            },
            "run_arms": ("transformer", "gru"),
            "baseline": "transformer",
        }
    )
    vary(config, VARIANTS, variant)
    return config
