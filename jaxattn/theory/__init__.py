"""The equations, arrays in and arrays out: attention, losses, laws, M-steps.

`row_blocks` computes attention by blocks of query rows, for `laws` and
`attention.readout`; `masks` and `sizes` are checks and masks that all share.
"""
