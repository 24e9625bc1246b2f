"""Arms x seeds x grid to arrays: plan, programs, rounds, checkpoints, processes."""
