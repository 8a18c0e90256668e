"""The length model in the API: ``length_guidance`` or ``custom_params`` of a request become the engine's
:class:`~engine.wire.LengthGuidance`, and length values become tokens."""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.output.answer import AnswerFormat, Thinking
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.schemas.generation import CustomParams, GenerationRequest, LengthGuidance

CANDIDATES = wire.LengthGuidance().top_k
CONSTRAINT_MIN_P = 0.01
"""Default ``min_p`` of requests with a constraint. A constraint considers lengths only and may choose implausible candidates of the
right length; with the demo models the text became meaningless without this bound."""
ABOUT_END_MIN_P = 0.0001
"""Default ``end_min_p`` with ``about``: a model that ranks many tokens above the end may else not end in time."""
THINKING_MIN_P = 0.1
"""Default ``min_p`` for targets of the thinking section. With 0.02, `eq` took wrong numbers of the right length
(docs/generation.md)."""
LEAST_TEMPERATURE, LEAST_TOP_P, MOST_MIN_P = 0.05, 0.05, 0.95
"""Settings beyond these leave guidance one candidate nearly everywhere, or one that takes nearly every draw."""
LEAST_SCALE = 1e-3
"""Nearer to the neutral scale, no probability changes noticeably."""
LARGEST = 1 - wire.SMALLEST_VALUE
"""Largest single-precision value that is converted exactly; larger ones only mean "long"."""
_SECTION = "length_guidance.applies_to"


def require_lenvm(model: ServedModel, param: str) -> float:
    """Return the length model's γ. Raises :class:`InvalidRequest` for a model without a length model."""
    if "length_guidance" not in model.info.capabilities or model.info.lenvm_gamma is None:
        remedy = "start its engine with --lenvm-model, or remove the field"
        raise InvalidRequest(f"`{param}`: the model {model.name!r} has no length model; {remedy}.", param=param)
    return model.info.lenvm_gamma


def guidance_of(model: ServedModel, fields: GenerationRequest, *, logprobs: int | None) -> wire.LengthGuidance | None:
    """Return the request's guidance, or None if it has none. ``logprobs``: number of top tokens in the answer, None for none.

    Raises :class:`InvalidRequest` for contradictions and for options that ``model`` does not support.
    """
    spelled = fields.custom_params.spelled() if fields.custom_params else {}
    if fields.length_guidance is not None:
        if spelled:
            message = "`custom_params` and `length_guidance` both set the length of the text; send one of them."
            raise InvalidRequest(message, param="custom_params")
        guidance = _guidance(model, fields.length_guidance, logprobs)
        _check_effect(fields, guidance, {name: f"length_guidance.{name}" for name in ("scale", "constraint", "top_k")})
        return guidance
    if not spelled or fields.custom_params is None:
        return None
    guidance = _custom_guidance(model, fields.custom_params, fields.top_k)
    _check_effect(fields, guidance, {name: f"custom_params.{keys[0]}" for name, keys in spelled.items()})
    return guidance


def _guidance(model: ServedModel, asked: LengthGuidance, logprobs: int | None) -> wire.LengthGuidance:
    require_lenvm(model, "length_guidance")
    names = {name: f"length_guidance.{name}" for name in asked.__struct_fields__}
    _check_target(asked, names)
    aimed = any(each is not None for each in (asked.target_length, asked.target_value, asked.max_length))
    idle = next((name for name in ("mode", "scale") if aimed and getattr(asked, name) is not None), None)
    if idle:
        raise InvalidRequest(f"`{names[idle]}` cannot be combined with a target; send one of the two.", param=names[idle])
    if asked.target_length_mode is not None and asked.target_length is None:
        raise InvalidRequest("`length_guidance.target_length_mode` needs `target_length`.", param=names["target_length_mode"])
    if asked.unit not in (None, "tokens"):
        _check_unit(model, asked, names)
    if asked.max_length is not None:
        _check_limit(model, asked, names)
    if asked.return_values and not logprobs:
        message = "`length_guidance.return_values` needs log-probabilities: set `logprobs` (chat: `logprobs` and `top_logprobs`)"
        raise InvalidRequest(f"{message} to the number of tokens whose values you want.", param=names["return_values"])
    most = model.info.limits.max_candidates
    if asked.top_k is not None and asked.top_k > most:
        raise InvalidRequest(f"`length_guidance.top_k` is at most {most} with this model.", param=names["top_k"])
    return _for_engine(asked, asked.top_k or CANDIDATES)


def _check_unit(model: ServedModel, asked: LengthGuidance, names: dict[str, str]) -> None:
    """Raise :class:`InvalidRequest` where lengths are counted in tokens only."""
    if asked.target_length is None and asked.max_length is None:
        message = "`length_guidance.unit` is the unit of `target_length` or `max_length`; send one of them."
        raise InvalidRequest(message, param=names["unit"])
    if asked.target_length_mode == "remaining" or asked.applies_to not in (None, "both"):
        message = (
            f"Lengths of a section and remaining lengths are counted in tokens, not in {asked.unit}; leave one of the two out."
        )
        raise InvalidRequest(message, param=names["unit"])
    if "grammar" not in model.info.capabilities:
        message = f"The tokeniser of {model.name!r} does not give the spelling of tokens, so lengths are counted in tokens only."
        raise InvalidRequest(message, param=names["unit"])


def _check_limit(model: ServedModel, asked: LengthGuidance, names: dict[str, str]) -> None:
    """Raise :class:`InvalidRequest` for a `max_length` that contradicts other fields, or that ``model`` cannot promise."""
    assert asked.max_length is not None
    others = ("target_length", "target_value", "constraint", "gamma")
    other = next((name for name in others if getattr(asked, name) is not None), None)
    if other is not None:
        raise InvalidRequest(f"`{names[other]}` cannot be combined with `max_length`; send one of the two.", param=names[other])
    calibration, param = model.info.lenvm_calibration, names["max_length"]
    if calibration is None:
        remedy = "add one with `yardstick lenvm evaluate --calibrate`, or give a `target_length`"
        raise InvalidRequest(f"`{param}`: the length model of {model.name!r} has no calibration; {remedy}.", param=param)
    most = max(map(float, calibration.log_ratio))
    if asked.max_length.confidence > most:
        message = f"`{param}.confidence` is at most {most:g} with this length model."
        raise InvalidRequest(message, param=f"{param}.confidence")


def _custom_guidance(model: ServedModel, params: CustomParams, top_k: int | None) -> wire.LengthGuidance:
    """Convert ``custom_params``. As in the published server, the request's own ``top_k`` is the number of candidates."""
    require_lenvm(model, "custom_params")
    spelled = params.spelled()
    twice = next((keys for keys in spelled.values() if len(keys) > 1), None)
    if twice:
        first, second, *_ = twice
        message = f"`custom_params.{second}` and `custom_params.{first}` are two names of one parameter; send one."
        raise InvalidRequest(message, param=f"custom_params.{second}")
    asked = params.length_guidance()
    _check_target(asked, {name: f"custom_params.{keys[0]}" for name, keys in spelled.items()})
    candidates = top_k if top_k is not None and top_k > 0 else CANDIDATES
    most = model.info.limits.max_candidates
    if candidates > most:
        raise InvalidRequest(f"`top_k` is at most {most} with `custom_params` and this model.", param="top_k")
    return _for_engine(asked, candidates)


def _check_effect(fields: GenerationRequest, guidance: wire.LengthGuidance, names: dict[str, str]) -> None:
    """Raise :class:`InvalidRequest` for guidance that cannot change a token. ``names``: of its fields in the request."""
    if guidance.needs_draw and fields.temperature == 0:
        param = names["constraint" if guidance.constraint else "scale"]
        remedy = "give a target with the constraint `about`, `eq`, `ge`, `le` or `within`, or set `temperature` above 0"
        raise InvalidRequest(f"`{param}` has no effect at temperature 0, where nothing is drawn; {remedy}.", param=param)
    if guidance.neutral:
        return
    neutral = wire.NEUTRAL_SCALE[guidance.mode]
    if guidance.constraint is None and abs(guidance.scale - neutral) < LEAST_SCALE:
        message = (
            f"`{names['scale']}` is so near to {neutral:g} that it changes nothing; leave it out, or set one that is farther away."
        )
        raise InvalidRequest(message, param=names["scale"])
    for param, given, bound, way in (
        ("temperature", fields.temperature if guidance.needs_draw else None, LEAST_TEMPERATURE, "least"),
        ("top_p", fields.top_p, LEAST_TOP_P, "least"),
        ("min_p", fields.min_p, MOST_MIN_P, "most"),
    ):
        if given is not None and (given < bound if way == "least" else given > bound):
            problem = "leaves length guidance no choice among candidates, so it would have no effect"
            raise InvalidRequest(
                f"`{param}` {given:g} {problem}; set it to at {way} {bound:g}, or leave one of the two out.", param=param
            )
    if 1 in (guidance.top_k, fields.top_k):
        param = "top_k" if fields.top_k == 1 else names["top_k"]
        message = f"`{param}` is 1, which leaves one candidate, so length guidance has no effect; set it to 2 or more."
        raise InvalidRequest(message, param=param)


def _check_target(asked: LengthGuidance, names: dict[str, str]) -> None:
    if asked.target_length is not None and asked.target_value is not None:
        message = f"`{names['target_value']}` and `{names['target_length']}` are two targets; give one."
        raise InvalidRequest(message, param=names["target_value"])
    if asked.constraint is not None and asked.target_length is None and asked.target_value is None:
        message = f"`{names['constraint']}` needs a target: give `target_length` or `target_value`."
        raise InvalidRequest(message, param=names["constraint"])
    if asked.constraint == "about" and (asked.target_length is None or asked.target_length_mode == "remaining"):
        remedy = "give `target_length`, and no `target_length_mode` `remaining`"
        message = f"`{names['constraint']}` `about` needs the length of the whole text: {remedy}."
        raise InvalidRequest(message, param=names["constraint"])


def _for_engine(asked: LengthGuidance, candidates: int) -> wire.LengthGuidance:
    aimed = asked.target_length is not None or asked.target_value is not None
    mode, limit = asked.mode or "centered_exp", asked.max_length
    constraint: wire.LengthConstraint | None = "within" if limit else asked.constraint or ("eq" if aimed else None)
    return wire.LengthGuidance(
        mode=mode,
        scale=wire.NEUTRAL_SCALE[mode] if asked.scale is None else asked.scale,
        gamma=asked.gamma,
        constraint=constraint,
        target_length=limit.at_most if limit else asked.target_length,
        confidence=limit.confidence if limit else None,
        unit=asked.unit or "tokens",
        target_length_mode=asked.target_length_mode or "total",
        target_value=asked.target_value,
        top_k=candidates,
        entropy_threshold=asked.entropy_threshold or 0.0,
        value_min=asked.value_min or 0.0,
        return_values=bool(asked.return_values),
        applies_to=asked.applies_to or "both",
        end_min_p=ABOUT_END_MIN_P if asked.end_min_p is None and constraint == "about" else asked.end_min_p,
    )


def default_min_p(guidance: wire.LengthGuidance | None) -> float | None:
    """Return ``min_p`` of a request that states none; None for the engine's default."""
    if guidance is None or guidance.constraint is None:
        return None
    return THINKING_MIN_P if guidance.applies_to == "thinking" else CONSTRAINT_MIN_P


def thinking_limit(tokens: int | None, format: AnswerFormat | None) -> wire.ThinkingLimit | None:
    """Return the limit of ``thinking_token_budget``; None if there is none or the answer has no thinking section. ``format``: of
    the answer, None if it is all text. Raises :class:`InvalidRequest` if the tags are several tokens."""
    thinking = None if format is None else format.thinking
    if tokens is None or thinking is None:
        return None
    return wire.ThinkingLimit(_tags(thinking, "thinking_token_budget"), tokens)


def _tags(thinking: Thinking, param: str) -> wire.Thinking:
    if thinking.close_id is None or (thinking.open_id is None and not thinking.opened):
        message = f"`{param}`: the model's tags around its thinking are no tokens of their own, so its end cannot be found."
        raise InvalidRequest(message, param=param)
    return wire.Thinking(thinking.close_id, None if thinking.opened else thinking.open_id)


def with_section(guidance: wire.LengthGuidance | None, format: AnswerFormat | None) -> wire.LengthGuidance | None:
    """Return ``guidance`` with the tokens that tell its section apart. ``format``: of the answer, None if it is all text.

    Raises :class:`InvalidRequest` for the thinking section of a model that does not think, and if the tags are several tokens.
    """
    if guidance is None or guidance.applies_to == "both":
        return guidance
    thinking = None if format is None else format.thinking
    if thinking is None:
        if guidance.applies_to == "answer":
            return msgspec.structs.replace(guidance, applies_to="both")
        raise InvalidRequest("The model does not think in this answer, so its thinking has no length.", param=_SECTION)
    section = _tags(thinking, _SECTION)
    return msgspec.structs.replace(guidance, thinking=section)


def refuse_sections(guidance: wire.LengthGuidance | None) -> None:
    """Raise :class:`InvalidRequest` for guidance of one section, where text has no sections."""
    if guidance is not None and guidance.applies_to != "both":
        raise InvalidRequest(f"`{_SECTION}` is only for /v1/chat/completions.", param=_SECTION)


def gamma_of_values(model: ServedModel, guidance: wire.LengthGuidance | None) -> float | None:
    """Return the γ that converts the answer's values to tokens; None if no values were requested."""
    if guidance is None or not guidance.return_values:
        return None
    return guidance.gamma or model.info.lenvm_gamma


def remaining_tokens(value: float, gamma: float) -> float:
    """Return the tokens that follow, for a rounded length ``value`` v in [0, 1]: v = 1 − γ^(remaining tokens). The bound
    :data:`LARGEST` limits the result to at most ln 1e-9 / ln γ.

    It is a proxy. v is a mean over all continuations of the text, and the inverse of a mean lies below the mean of the inverses
    (ln is concave); the difference grows with the uncertainty of the length. "Length Value Model", arXiv 2604.27039.
    """
    return math.log1p(-min(value, LARGEST)) / math.log(gamma)


def intervals(calibration: wire.Calibration, value: float, tokens: float) -> dict[str, tuple[float, float]]:
    """Return bounds of the real remaining tokens by their probability. ``tokens``: those of ``value``. A text has at least its
    end to come."""
    place = bisect_right(calibration.edges, value)
    found = {}
    for name, levels in {"0.5": ("0.25", "0.75"), "0.9": ("0.05", "0.95")}.items():
        if all(level in calibration.log_ratio for level in levels):
            low, high = (max(1.0, max(1.0, tokens) * math.exp(calibration.log_ratio[level][place])) for level in levels)
            found[name] = low, high
    return found


def value_and_remaining(logit: float, gamma: float) -> tuple[float, float]:
    """Return v = σ(z) and the proxy of :func:`remaining_tokens`, accurate in double precision even if v rounds to 1: ln(1 − v) =
    −softplus(z)."""
    small = math.exp(-abs(logit))
    value = 1 / (1 + small) if logit >= 0 else small / (1 + small)
    softplus = max(logit, 0.0) + math.log1p(small)
    return value, -softplus / math.log(gamma)
