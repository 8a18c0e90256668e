"""``length_guidance`` and ``custom_params``: length guidance of a generating request."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from engine import wire

Scale = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Gamma = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Value = Annotated[float, msgspec.Meta(ge=0, le=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Nats = Annotated[float, msgspec.Meta(ge=0)]
LengthMode = Literal["total", "remaining"]


class LengthGuidance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Guide the length of the text: `{"scale": -10}` for a shorter one, `{"target_length": 80}` for about 80 tokens.

    At each token, the length model estimates for the few most probable candidates how much text follows them. Give a `scale` or a
    target. At temperature 0 the constraints `eq`, `ge` and `le` choose among the candidates of temperature 1; scales and `eq_soft`
    need a draw and are refused.
    """

    mode: wire.GuidanceMode | None = None
    """Interpretation of `scale`; `centered_exp` by default."""
    scale: Scale | None = None
    """`centered_exp` and `value_bias`: below 0 is shorter, above 0 longer. `mul`, `length_mul`, `linear` and `exp`: below 1 is
    shorter, above 1 longer. Without it, nothing changes."""
    gamma: Gamma | None = None
    """Discount factor, in place of the length model's own."""
    target_length: Tokens | None = None
    """Tokens of the whole completion, without the token that ends it."""
    target_length_mode: LengthMode | None = None
    """`total`, the default, or `remaining`: after every token, this many tokens are to follow."""
    target_value: Value | None = None
    """In place of `target_length`: the value that the candidates should have."""
    constraint: wire.LengthConstraint | None = None
    """Meaning of the target; `eq` by default. `eq`: take the candidate that leads nearest to it. `le`: take the shortest. `ge`:
    take the longest until the target is reached, then the shortest. `eq_soft`: draw so that the mean is the target. With a
    constraint, `min_p` is 0.01 by default, and 0.1 if it applies to the thinking section."""
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Most candidates; 5 by default, and never more than the request's own `top_k`."""
    entropy_threshold: Nats | None = None
    """Do not guide tokens whose candidates have less entropy than this, in nats; 0 by default."""
    value_min: Value | None = None
    """Do not guide tokens whose candidates' mean value is below this; 0 by default."""
    applies_to: Literal["both", "thinking", "answer"] | None = None
    """Guide only this section of a chat answer; `both` by default. `target_length` counts the tokens of this section."""
    return_values: bool | None = False
    """Return the value of each of the most probable tokens with its log-probability."""


ConstraintWord = Literal["eq", "=", "==", "equal", "ge", ">", ">=", "gte", "le", "<", "<=", "lte", "eq_soft", "soft"]
_CONSTRAINTS: dict[str, wire.LengthConstraint] = {
    **dict.fromkeys(("eq", "=", "==", "equal"), "eq"),
    **dict.fromkeys(("ge", ">", ">=", "gte"), "ge"),
    **dict.fromkeys(("le", "<", "<=", "lte"), "le"),
    **dict.fromkeys(("eq_soft", "soft"), "eq_soft"),
}


class CustomParams(msgspec.Struct, kw_only=True):
    """`length_guidance` with the field names of the length value model's published clients. Give only one of the two."""

    value_mode: wire.GuidanceMode | None = None
    """See `length_guidance.mode`; here the default is `mul`."""
    mode: wire.GuidanceMode | None = None
    """Another name of `value_mode`."""
    value_scale: Scale | None = None
    """See `length_guidance.scale`."""
    scale: Scale | None = None
    """Another name of `value_scale`."""
    gamma: Gamma | None = None
    """See `length_guidance.gamma`."""
    length_gamma: Gamma | None = None
    """Another name of `gamma`."""
    value_min: Value | None = None
    """See `length_guidance.value_min`."""
    value_entropy_threshold: Nats | None = None
    """See `length_guidance.entropy_threshold`."""
    entropy_threshold: Nats | None = None
    """Another name of `value_entropy_threshold`."""
    target_value: Value | None = None
    """See `length_guidance.target_value`."""
    target_length: Tokens | None = None
    """See `length_guidance.target_length`."""
    target_length_mode: LengthMode | None = None
    """See `length_guidance.target_length_mode`."""
    length_mode: LengthMode | None = None
    """Another name of `target_length_mode`."""
    value_constraint: ConstraintWord | None = None
    """See `length_guidance.constraint`; other spellings are accepted."""
    constraint: ConstraintWord | None = None
    """Another name of `value_constraint`."""
    cmp: ConstraintWord | None = None
    """Another name of `value_constraint`."""
    op: ConstraintWord | None = None
    """Another name of `value_constraint`."""

    def spelled(self) -> dict[str, list[str]]:
        """Return the given fields of :class:`LengthGuidance`, with their names in this struct."""
        given = {name: [key for key in keys if getattr(self, key) is not None] for name, keys in _SPELLINGS.items()}
        return {name: keys for name, keys in given.items() if keys}

    def length_guidance(self) -> LengthGuidance:
        """Convert to :class:`LengthGuidance`. If one field has two names here, the first one counts."""
        told = {name: getattr(self, keys[0]) for name, keys in self.spelled().items()}
        if "constraint" in told:
            told["constraint"] = _CONSTRAINTS[told["constraint"]]
        return LengthGuidance(**{"mode": "mul"} | told)


_SPELLINGS = {
    "mode": ("value_mode", "mode"),
    "scale": ("value_scale", "scale"),
    "gamma": ("gamma", "length_gamma"),
    "value_min": ("value_min",),
    "entropy_threshold": ("value_entropy_threshold", "entropy_threshold"),
    "target_value": ("target_value",),
    "target_length": ("target_length",),
    "target_length_mode": ("target_length_mode", "length_mode"),
    "constraint": ("value_constraint", "constraint", "cmp", "op"),
}
