"""Fields of requests that generate, and of constraints on what is generated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.schemas.common import ModelRequest

Scale = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Gamma = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Value = Annotated[float, msgspec.Meta(ge=0, le=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Nats = Annotated[float, msgspec.Meta(ge=0)]
LengthMode = Literal["total", "remaining"]


class MaxLength(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A length that is kept with a probability, as the calibration of the length model measured it."""

    at_most: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of the whole completion, without the token that ends it."""
    confidence: Annotated[float, msgspec.Meta(ge=0.5, lt=1)] = 0.95
    """Probability, from 0.5 to the largest level of the calibration."""


class LengthGuidance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Guide the length of the text: `{"scale": -10}` for a shorter one, `{"target_length": 80}` for about 80 tokens.

    At each token, the length model estimates for the few most probable candidates how much text follows them. Give a `scale` or a
    target. The constraints `about`, `eq`, `ge`, `le` and `within` choose among the candidates of temperature 1 at every
    temperature; scales and `eq_soft` need a draw and are refused below temperature 0.05.
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
    unit: wire.LengthUnit | None = None
    """Unit of `target_length` and of `max_length.at_most`; tokens by default. Tokens of a unit are estimated from the prompt and
    corrected by what has been written."""
    target_length_mode: LengthMode | None = None
    """`total`, the default, or `remaining`: after every token, this many tokens are to follow."""
    target_value: Value | None = None
    """In place of `target_length`: the value that the candidates should have."""
    max_length: MaxLength | None = None
    """In place of a target: `{"at_most": 120, "confidence": 0.95}`, by the calibration of the length model."""
    constraint: wire.LengthConstraint | None = None
    """Meaning of the target; `eq` by default. `eq`: take the candidate that leads nearest to it. `about`: draw, each candidate by
    its probability times that of a text whose length is within 10 % of `target_length`. `le`: take the shortest. `ge`: take the
    longest until the target is reached, then the shortest. `within`: draw among those that are not longer than the target, or
    take the shortest. `eq_soft`: draw so that the mean is the target. With a constraint, `min_p` is 0.01 by default, and 0.1 if
    it applies to the thinking section."""
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Most candidates; 5 by default, and never more than the request's own `top_k`."""
    entropy_threshold: Nats | None = None
    """Do not guide tokens whose candidates have less entropy than this, in nats; 0 by default."""
    value_min: Value | None = None
    """Do not guide tokens whose candidates' mean value is below this; 0 by default."""
    applies_to: Literal["both", "thinking", "answer"] | None = None
    """Guide only this section of a chat answer; `both` by default. `target_length` counts the tokens of this section."""
    end_min_p: Value | None = None
    """Make the token that ends the text a candidate where it has at least this fraction of the largest probability, also beyond
    `top_k` and `min_p`; 0.001 by default with `about`, and otherwise it is treated as any other token."""
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


MAX_CHOICES = 4096
MAX_BAD_WORDS = 256
MAX_ALLOWED_TOKENS = 16_384

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema and its name."""

    schema: Schema
    """A JSON Schema. Keywords that cannot be enforced are refused."""
    name: str | None = None
    """Accepted for compatibility and not used."""
    description: str | None = None
    """Accepted for compatibility and not used."""
    strict: bool | None = None
    """Accepted for compatibility: the output always follows the schema."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form of the output."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    """`json_object`: any JSON object; `json_schema`: JSON that follows `json_schema.schema`. `json` and `regex`: what `value` says,
    in the form of Text Generation Inference (TGI)."""
    json_schema: JsonSchema | None = None
    """Only with the type `json_schema`."""
    schema: Schema | None = None
    """A JSON Schema in the form of llama.cpp: with the type `json_object`, or in place of `json_schema`."""
    value: Schema | str | None = None
    """A JSON Schema with the types `json` and `json_object`, or a pattern with the type `regex`, in the form of TGI."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's constraints; exactly one is given."""

    json: Schema | str | None = None
    """A JSON Schema, or its text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Choices | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A grammar in Lark or GBNF."""
    json_object: bool | None = None
    """The output is a JSON object."""


class StructuredRequest(ModelRequest, kw_only=True):
    """Fields that constrain the output. At most one of those before `allowed_token_ids` is given."""

    response_format: ResponseFormat | None = None
    """Let the output be JSON, see [structured output](generation.md#structured-output)."""
    structured_outputs: StructuredOutputs | None = None
    """Constrain the output to a schema, a pattern, a choice or a grammar."""
    guided_json: Schema | str | None = None
    """The older name of `structured_outputs.json`."""
    guided_regex: str | None = None
    """The older name of `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """The older name of `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """The older name of `structured_outputs.grammar`."""
    json_schema: Schema | str | None = None
    """The name of SGLang and llama.cpp for `structured_outputs.json`."""
    regex: str | None = None
    """SGLang's name of `structured_outputs.regex`."""
    ebnf: str | None = None
    """SGLang's name of `structured_outputs.grammar`."""
    grammar: str | None = None
    """llama.cpp's name of `structured_outputs.grammar`."""
    allowed_token_ids: Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    """Only these tokens may be generated."""
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are not generated, at the start of a word or within one."""


_SMALL = {*ModelRequest.__struct_fields__, "allowed_token_ids"}
BULK: dict[str, Any] = dict.fromkeys(name for name in StructuredRequest.__struct_fields__ if name not in _SMALL)
"""Fields that only text workers read, with their stand-ins."""


MAX_STOPS = 16
MAX_LOGPROBS = 20

StopText = Annotated[str, msgspec.Meta(min_length=1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct):
    """Contents of a stream besides text."""

    include_usage: bool | None = False
    """Send one more chunk with the token counts before the end."""
    continuous_usage_stats: bool | None = False
    """Every chunk carries the token counts of its own prompt and completion so far; only with `include_usage`."""


class PromptLogprob(msgspec.Struct, kw_only=True):
    """The log-probability of a token at a position of the prompt, in vLLM's format."""

    logprob: float
    """-9999 represents a probability of zero."""
    rank: int | None
    """Rank of the token at its position, from 1; null for the prompt's own token if it is not among the most probable ones."""
    decoded_token: str


class PromptLookup(msgspec.Struct, forbid_unknown_fields=True):
    """Drafts of the next tokens, from earlier places in prompt and output with the same last tokens."""

    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=wire.MAX_DRAFT_TOKENS)] = 8
    """Most tokens of a draft; 0 for no drafts."""
    ngram: Annotated[int, msgspec.Meta(ge=1, le=wire.MAX_NGRAM)] = 3
    """Number of last tokens that must be the same."""


class TextRequest(StructuredRequest, kw_only=True):
    """Fields of all generating endpoints. Null always means the default."""

    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    """Up to 16 texts that end the completion. They are not part of it."""
    stream: bool | None = False
    """Send the completion piece by piece as server-sent events."""
    seed: int | None = None
    """Seed of the draws: equal seed, prompt and settings give equal tokens. The default is a random seed."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    """1, the default, draws from the model's own probabilities; 0 always takes the most probable token."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Draw from the most probable tokens whose probabilities sum to this; 1 by default."""
    presence_penalty: Penalty | None = None
    """Makes tokens that have already occurred less probable."""
    frequency_penalty: Penalty | None = None
    """Makes tokens less probable with each time that they have occurred."""
    logit_bias: dict[int, Bias] | None = None
    """Numbers to add to the logits of tokens, by token id."""
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    """Draw from this many most probable tokens; 0 or -1 means all."""
    min_p: Fraction | None = None
    """Draw only tokens at least this fraction as probable as the most probable one."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 changes nothing."""
    min_tokens: Count | None = None
    """The completion does not end before this many tokens."""
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=256)] | None = None
    """Token ids that end the completion."""
    ignore_eos: bool | None = False
    """Continue when the model would end the completion."""
    skip_special_tokens: bool | None = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool | None = False
    """Keep the text or token that ended the completion."""
    prompt_lookup: PromptLookup | None = None
    """Draft tokens from the text so far, which saves time where the output repeats parts of it. It changes no token. The default
    is the engine's setting."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token. The default is true in a raw `prompt` and false in `messages`."""
    length_guidance: LengthGuidance | None = None
    """Guide the length of the text; only with a model that has a length model."""
    custom_params: CustomParams | None = None
    """`length_guidance` with the field names of the length value model's published clients."""


class GenerationRequest(TextRequest, kw_only=True):
    """Fields of completions and chat completions."""

    n: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """Completions of each prompt; 1 by default."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token of the prompt, and of this many most probable tokens at its position; not with
    `stream`."""
    return_token_ids: bool | None = False
    """Return the token ids of the prompt and of the completion."""
    return_tokens_as_token_ids: bool | None = False
    """Show tokens in `logprobs` as `token_id:ID`, which tells tokens of the same text apart."""

    @property
    def sequences(self) -> int:
        """``n``, or its default."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries token counts, which vLLM sends only together with the final counts."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, *, max_tokens: int, seed: int) -> wire.Sampling:
        """Return the engine's parameters for these fields."""
        given = {
            "temperature": self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "min_tokens": self.min_tokens,
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
        }
        return wire.Sampling(
            max_tokens=max_tokens,
            seed=seed,
            n=self.sequences,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
