"""The laws at any length: streaming attention with taps, and its Flax adapter."""
