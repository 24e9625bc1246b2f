"""What is trained: a transformer, and baselines without attention."""
