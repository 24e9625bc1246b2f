"""Arrays to numbers: statistics over seeds, entries of summary.json, verdicts."""
