"""``length_guidance`` and ``custom_params``: how a generating request steers its length."""

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
    """Steer how long the text gets: `{"scale": -10}` for shorter, `{"target_length": 80}` for about 80 tokens.

    At each token the length model judges the few most probable candidates by how much text is still to come after them. Give a
    `scale`, or a target. At temperature 0 nothing is drawn and nothing is steered.
    """

    mode: wire.GuidanceMode | None = None
    """How `scale` is read; `centered_exp` unless given."""
    scale: Scale | None = None
    """`centered_exp` and `value_bias`: below 0 is shorter, above 0 longer. `mul`, `length_mul`, `linear` and `exp`: below 1 is
    shorter, above 1 longer. Changes nothing unless given."""
    gamma: Gamma | None = None
    """The discount of the length model, where another than its own is wanted."""
    target_length: Tokens | None = None
    """Tokens of the whole completion, the ending one not counted."""
    target_length_mode: LengthMode | None = None
    """`total`, unless given, or `remaining`: at every token, so many are wanted after it."""
    target_value: Value | None = None
    """Instead of `target_length`: the value that the candidates should have."""
    constraint: wire.Constraint | None = None
    """What the target means; `eq` unless given. `eq`: take the candidate that leads nearest to it. `le`: take the shortest. `ge`:
    the longest until the target is reached, then the shortest. `eq_soft`: draw so that the mean is the target. `min_p` is 0.01
    unless given."""
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Candidates at most; 5 unless given, and never more than the request's own `top_k`."""
    entropy_threshold: Nats | None = None
    """Leave tokens alone whose candidates have less entropy than this, in nats; 0 unless given."""
    value_min: Value | None = None
    """Leave tokens alone whose candidates' mean value is below this; 0 unless given."""
    return_values: bool | None = False
    """Tell the value of each of the most probable tokens beside its log-probability."""


ConstraintWord = Literal["eq", "=", "==", "equal", "ge", ">", ">=", "gte", "le", "<", "<=", "lte", "eq_soft", "soft"]
_CONSTRAINTS: dict[str, wire.Constraint] = {
    **dict.fromkeys(("eq", "=", "==", "equal"), "eq"),
    **dict.fromkeys(("ge", ">", ">=", "gte"), "ge"),
    **dict.fromkeys(("le", "<", "<=", "lte"), "le"),
    **dict.fromkeys(("eq_soft", "soft"), "eq_soft"),
}


class CustomParams(msgspec.Struct, kw_only=True):
    """`length_guidance` in the words of the length value model's published clients. Give one of the two."""

    value_mode: wire.GuidanceMode | None = None
    """As `length_guidance.mode`, but `mul` unless given."""
    mode: wire.GuidanceMode | None = None
    """The same as `value_mode`."""
    value_scale: Scale | None = None
    """As `length_guidance.scale`."""
    scale: Scale | None = None
    """The same as `value_scale`."""
    gamma: Gamma | None = None
    """As `length_guidance.gamma`."""
    length_gamma: Gamma | None = None
    """The same as `gamma`."""
    value_min: Value | None = None
    """As `length_guidance.value_min`."""
    value_entropy_threshold: Nats | None = None
    """As `length_guidance.entropy_threshold`."""
    entropy_threshold: Nats | None = None
    """The same as `value_entropy_threshold`."""
    target_value: Value | None = None
    """As `length_guidance.target_value`."""
    target_length: Tokens | None = None
    """As `length_guidance.target_length`."""
    target_length_mode: LengthMode | None = None
    """As `length_guidance.target_length_mode`."""
    length_mode: LengthMode | None = None
    """The same as `target_length_mode`."""
    value_constraint: ConstraintWord | None = None
    """As `length_guidance.constraint`, or one of its other spellings."""
    constraint: ConstraintWord | None = None
    """The same as `value_constraint`."""
    cmp: ConstraintWord | None = None
    """The same as `value_constraint`."""
    op: ConstraintWord | None = None
    """The same as `value_constraint`."""

    def spelled(self) -> dict[str, list[str]]:
        """The fields of :class:`LengthGuidance` that are given, and the names that they have here."""
        given = {name: [key for key in keys if getattr(self, key) is not None] for name, keys in _SPELLINGS.items()}
        return {name: keys for name, keys in given.items() if keys}

    def length_guidance(self) -> LengthGuidance:
        """The same in our words; of two names for one thing, the first counts."""
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
