"""Fields that constrain the output to a schema, a pattern, a choice or a grammar, in the forms of OpenAI, vLLM, SGLang and
llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gateway.schemas.parameters import Parameters

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


class StructuredRequest(Parameters, kw_only=True):
    """Fields that constrain the output. At most one of those before `allowed_token_ids` is given."""

    response_format: ResponseFormat | None = None
    """Let the output be JSON, see [structured output](structured-output.md)."""
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


BULK: dict[str, Any] = dict.fromkeys(
    (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "bad_words",
    )
)
"""Fields that only text workers read, with their stand-ins."""
