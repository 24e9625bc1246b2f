"""How parameters move: pure (init, step) pairs, by gradient, by role, by EM."""
