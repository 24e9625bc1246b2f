"""Arrays to numbers: the run directory, statistics over seeds, verdicts."""
