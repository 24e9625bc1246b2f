"""Architectures: fields that do not fit are named."""

import dataclasses

import pytest
from small_models import architecture


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("kind", "lstm", "one of transformer, mlp, history_mlp, gru"),
        ("norm", "layer", "one of none, pre, post"),
        ("positions", "sin", "one of none, learned, rotary, learned_rotary"),
        ("depth", -1, "an integer, at least 0"),
        ("depth", 2.0, "an integer, at least 0"),
        ("heads", 0, "an integer, at least 1"),
        ("heads", 3, "a divisor of heads, 3"),
        ("kv_heads", 3, "a divisor of heads, 4"),
        ("d_head", 5, "an even number with rotary positions"),
        ("width", True, "an integer, at least 1"),
        ("residual", 1, "true or false"),
        ("dropout_rate", 1.0, "a number from 0, below 1"),
        ("num_tokens", 0, "0 for tokens, and 1 or more"),
        ("d_x", 3, "0 for tokens, and 1 or more where num_tokens is 0"),
    ],
)
def test_a_field_that_does_not_fit(field, value, must):
    message = rf"^{field}={value!r}: must be {must}"
    if (field, value) in (("heads", 3), ("num_tokens", 0)):  # then another is wrong
        message = rf"^(kv_heads=2|d_x=0): must be {must}"
    for built in (architecture, lambda **f: dataclasses.replace(architecture(), **f)):
        with pytest.raises(ValueError, match=message) as caught:
            built(**{field: value})
        assert "\n" not in str(caught.value)
