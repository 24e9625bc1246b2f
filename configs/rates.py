"""The phase map: how fast values may move beside routing, tuned against tuned.

    python scripts/train.py --config=configs/rates.py         # 2 x 63 points, 8 seeds
    python scripts/train.py --config=configs/rates.py:smoke   # seconds
    python scripts/train.py --config=configs/rates.py:full    # T = 1999, 32 seeds

Each arm runs at every ratio η_V / η_QK x scale η_QK (= η_O), on one sequence and with
fresh ones. `two_timescale` at ratio 1 is SGD, at ratio 10 and scale 0.01 the authors'
EM-like rates. For M-steps in closed form the ratio divides the ridge.

Expected (results/rates/report.md): with fresh sequences, tuned, 0.05 to 0.06 nats from
Bayes, faster values no nearer than SGD; on one sequence nothing learns to speak of.
"""

from ml_collections import ConfigDict

from jaxattn.experiments.arms import em, rates
from jaxattn.experiments.config import vary

VARIANTS = {
    "smoke": {
        "seeds": 2,
        "steps": 20,
        "eval_every": 10,
        "task.length": 65,
        "grid.scale": (0.1, 1.0),
        "grid.ratio": (0.1, 1.0, 10.0),
    },
    "full": {
        "seeds": 32,
        "steps": 1000,
        "task.length": 2000,
        "gradient": "streaming",
    },
}


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "experiment": "grid",
            "seeds": 8,
            "seed": 0,  # root of every random key
            "steps": 500,
            "eval_every": 20,
            "batch_size": 1,  # sequences per step
            "gradient": "streaming",
            "model": {"d_k": 10, "d_v": 15, "init_scale": 0.1, "bias": False},
            "task": {
                "name": "sticky",
                "length": 257,
                "num_symbols": 8,
                "d_x": 20,
                "stay": 0.3,
                "embedding_seed": 0,
            },
            "grid": {
                "scale": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
                "ratio": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
                "fresh": (False, True),  # one sequence, or a new one every step
                "threshold": 0.08,  # of held-out KL to Bayes, nats: steps until there
            },
            "arms": {
                "two_timescale": rates(1.0, 1.0, 1.0),
                "em_gradient": em("gradient", 1.0, inner_steps=5, value_rate=1.0),
                "em_majorised": em(
                    "majorised", 1.0, ridge=0.1, damping=1.0, statistics_rate=1.0
                ),
                "em_online": em(
                    "majorised", 1.0, ridge=0.1, damping=1.0, statistics_rate=0.05
                ),
            },
            "run_arms": ("two_timescale", "em_gradient", "em_majorised", "em_online"),
        }
    )
    vary(config, VARIANTS, variant)
    return config
