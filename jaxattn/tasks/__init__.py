"""Tasks: sequences whose Bayes-optimal answer is known exactly, one file per task."""
