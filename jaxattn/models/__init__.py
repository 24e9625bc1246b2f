"""Models to train: a transformer, and baselines without attention."""
