"""The proof of the laws, for scripts/check_gradients.py.

    python scripts/check_gradients.py --config=configs/gradients.py        # 64 problems
    python scripts/check_gradients.py --config=configs/gradients.py:smoke  # 8 problems

Expected (results/gradients/report.txt): "All laws hold."; against autodiff errors of at
most 1e-14 in float64 and 7e-6 in float32; slopes of the remainder within 0.004 of 2.
"""

from ml_collections import ConfigDict

from jaxattn.experiments.arms import gradient
from jaxattn.experiments.config import vary

VARIANTS = {
    "smoke": {
        "seeds": 8,
        "shapes": 1,
        "slopes.problems": 8,
        "shares.seeds": 2,
        "shares.steps": 6,
        "run_arms": ("sgd",),
        "task.length": 100,
    }
}


def get_config(variant: str = "") -> ConfigDict:
    """The config, or one of `VARIANTS` of it."""
    config = ConfigDict(
        {
            "experiment": "proof",
            "seeds": 64,  # random problems
            "seed": 0,  # root of every random key
            "shapes": 2,  # of the problems; each is compiled once
            "longest": 16,  # most queries and sources
            "widest": 8,
            # Largest relative errors: of a law in float64 and in float32 against
            # autodiff, and of a law in float64 against central differences.
            "bounds": {"float64": 1e-12, "float32": 1e-5, "difference": 1e-6},
            # The remainder of a step of descent against its rate.
            "slopes": {"problems": 64, "decades": 5, "rates": 11, "tolerance": 0.05},
            # Short runs of each arm, on one sequence and on fresh ones.
            "shares": {"seeds": 8, "steps": 30},
            "model": {"d_k": 10, "d_v": 15, "init_scale": 0.1, "bias": False},
            "task": {
                "name": "sticky",
                "length": 257,
                "num_symbols": 8,
                "d_x": 20,
                "stay": 0.3,
                "embedding_seed": 0,
            },
            "arms": {
                "sgd": gradient("sgd", 0.1),
                "momentum": gradient("momentum", 0.1),
                "adam": gradient("adam", 0.01),
            },
            "run_arms": ("sgd", "momentum", "adam"),
        }
    )
    vary(config, VARIANTS, variant)
    return config
