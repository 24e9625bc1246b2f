"""The architecture of a model: what it is built as, checked field by field."""

import dataclasses
from collections.abc import Iterator

KINDS = ("transformer", "mlp", "history_mlp", "gru")
NORMS = ("none", "pre", "post")
POSITIONS = ("none", "learned", "rotary", "learned_rotary")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a model is built as; hashable, so that it may be static.

    Raises:
      ValueError: a field does not fit; names it.
    """

    kind: str  # of `KINDS`
    num_tokens: int  # 0: inputs are vectors
    d_x: int  # width of input vectors; 0: inputs are tokens
    num_classes: int
    length: int  # of learned positions, or of a history
    depth: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int  # key-value heads, a divisor of `heads`
    d_head: int
    mlp_width: int  # hidden units of each layer; 0: no MLP
    residual: bool
    norm: str  # of `NORMS`
    positions: str  # of `POSITIONS`
    bias: bool = False  # in projections and read-out; an MLP always has biases
    value_norm: bool = False  # LayerNorm on the values of each head
    dropout_rate: float = 0.0  # of attention weights, in training

    def __post_init__(self):
        """Checks the fields."""
        wrong = next(_wrong_fields(self), None)
        if wrong is not None:
            name, must = wrong
            raise ValueError(f"{name}={getattr(self, name)!r}: must be {must}")


def _wrong_fields(a: Architecture) -> Iterator[tuple[str, str]]:
    """Fields that do not fit, each with what it must be."""
    for name, names in (("kind", KINDS), ("norm", NORMS), ("positions", POSITIONS)):
        if getattr(a, name) not in names:
            yield name, f"one of {', '.join(names)}"
    for names, least in (
        (("num_classes", "length", "width", "heads", "kv_heads", "d_head"), 1),
        (("num_tokens", "d_x", "depth", "mlp_width"), 0),
    ):
        for name in names:
            size = getattr(a, name)
            if type(size) is not int or size < least:
                yield name, f"an integer, at least {least}"
    for name in ("residual", "bias", "value_norm"):
        if type(getattr(a, name)) is not bool:
            yield name, "true or false"
    if type(a.dropout_rate) not in (int, float) or not 0 <= a.dropout_rate < 1:
        yield "dropout_rate", "a number from 0, below 1"
    if (a.num_tokens == 0) == (a.d_x == 0):
        yield "d_x", "0 for tokens, and 1 or more where num_tokens is 0"
    if a.kind == "transformer" and a.heads % a.kv_heads > 0:
        yield "kv_heads", f"a divisor of heads, {a.heads}"
    if a.positions.endswith("rotary"):
        if a.kind != "transformer":
            yield "positions", "none or learned without attention"
        if a.d_head % 2 > 0:
            yield "d_head", "an even number with rotary positions"
