"""What is asked of a model: diagnostics, geometry, distances to the posterior."""
