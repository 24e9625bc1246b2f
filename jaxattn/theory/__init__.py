"""The equations, arrays in and arrays out: attention, losses, laws, M-steps."""
