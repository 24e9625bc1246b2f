"""The laws at any length: streaming attention with taps, and its Flax adapter.

Users call `streaming` and `flax_attention`. Inside: `arguments` checks those of
`attend`; `forward` and `backward` do the work of one head over the blocks of `tiles`,
with the masks of `dropout` and the sums of `statistics`; `heads` maps them over heads;
`sharding` is for several devices.
"""
