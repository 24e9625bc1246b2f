"""Models to train: a transformer, and baselines without attention.

Users call `transformer`; `architecture` has the fields of a model and their checks,
`layers` its flax.nnx modules.
"""
