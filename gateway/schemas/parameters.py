"""Reading of request bodies as structs: fields of several endpoints, and errors that name what is wrong.

A parameter that would change the answer is refused with status 400, unless its value requests the behaviour that the server has
anyway. One that would not change the answer is accepted, ignored, and named in ``x-yardstick-ignored``. The names come from
OpenAI's API reference, vLLM's and SGLang's ``protocol.py``, Text Embeddings Inference, Text Generation Inference, llama.cpp and
Ollama, and from the API references of Cohere, Jina and Voyage. ``docs/api.md`` shows this table.

A decoder that refuses unknown fields decodes each body. Only if it meets one, the body is decoded again, leniently, and searched
for unknown names. A body longer than ``SEARCHED_BYTES`` is decoded leniently at once and is not searched; of its ignored fields,
only those in :data:`gateway.schemas.parameters.IGNORED` are named.

**Misspelt and misplaced fields.** An unknown name is refused if it is nearly that of a known field, or that of a field of an object
that refuses unknown ones (such as ``length_guidance``), and the value fits that field. Other unknown names are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import UnionType
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from yardstick_llm.gateway.errors import InvalidRequest

MAX_SECONDS = 86_400.0
"""Longest time limit of a request."""
TokenId = Annotated[int, msgspec.Meta(ge=0)]

EndpointName = Literal[
    "score",
    "rerank",
    "classify",
    "embeddings",
    "completions",
    "chat",
    "responses",
    "length",
    "tokenize",
    "detokenize",
    "catalogue",
    "catalogue_items",
    "load_adapter",
    "unload_adapter",
    "tei",
    "cohere_embed",
]

OWN: tuple[EndpointName, ...] = (
    "catalogue",
    "catalogue_items",
    "load_adapter",
    "unload_adapter",
    "tei",
    "cohere_embed",
)
"""Endpoints that do not answer prompts, or answer the clients of one server. The tables below do not apply to them."""
ALL: tuple[EndpointName, ...] = tuple(endpoint for endpoint in get_args(EndpointName) if endpoint not in OWN)
GENERATING: tuple[EndpointName, ...] = ("completions", "chat", "responses")
MULTIPLE: tuple[EndpointName, ...] = ("completions", "chat")
"""Endpoints whose requests may have several answers."""
UNCUT: tuple[EndpointName, ...] = ("completions", "chat", "responses", "length", "tokenize", "detokenize")
"""Endpoints whose texts are never cut."""
TEMPLATED: tuple[EndpointName, ...] = ("chat", "responses", "length")

BEAMS = "there is no beam search; ask for `n` completions and choose"
TEXT = "input and output are text"
SAMPLERS = "use `temperature`, `top_k`, `top_p` or `min_p`"
TOKENS = "use `logit_bias`"
NEVER_CUT = "prompts are not truncated; shorten the prompt"
ADAPTERS = "name the adapter in `model`, as `adapter` or `base:adapter`"
RAW_OUTPUT = "an answer holds text and, with `logprobs`, tokens"
TEMPLATE = "the model's own chat template is used; `chat_template_kwargs` passes variables to it"
EFFORT = "use `reasoning.effort`"
ONE_ANSWER = "a response has one answer; use /v1/chat/completions"
ON_CHAT = "use /v1/chat/completions"
FLOAT32 = "embeddings are numbers or, with `encoding_format` `base64`, float32"
PIXELS = "images are processed as the model's settings say"
UNRENDERED = "send the rendered texts as `input`"
AS_PROMPT = "send text or token ids as `prompt`"
TOP_LEVEL = "send each parameter as a field of the request"


class Parameters(msgspec.Struct, kw_only=True):
    """Base class of request bodies."""

    endpoint: ClassVar[EndpointName]
    """Selects the rows of this module's tables."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] | None = None
    """Time in seconds within which the whole answer is of use, streams included; after it the request ends with an error."""

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise :class:`InvalidRequest` if one of the fields ``names`` is given: not null, false or 0. ``why`` follows its name."""
        given = next((name for name in names if getattr(self, name) not in (None, False)), None)
        if given is not None:
            raise InvalidRequest(f"`{given}` {why}", param=given)


@dataclass(frozen=True)
class Refused:
    """A parameter that would change the answer and is not supported."""

    name: str
    endpoints: tuple[EndpointName, ...]
    remedy: str
    """Reason, or what to use instead."""
    accepts: tuple[Any, ...] = ()
    """Values, besides null, that request the behaviour that the server has anyway."""

    @property
    def message(self) -> str:
        """Message of the error."""
        return f"`{self.name}` is not supported: {self.remedy}."


@dataclass(frozen=True)
class Ignored:
    """A parameter that has no effect here and would not change the answer elsewhere."""

    name: str
    endpoints: tuple[EndpointName, ...]


REFUSED: tuple[Refused, ...] = (
    Refused("structural_tag", GENERATING, "use `tools`, or a `lark` grammar"),
    Refused("stop_regex", GENERATING, "use `stop`, with fixed texts", ([],)),
    Refused("tools", ("completions",), ON_CHAT, ([],)),
    Refused("tool_choice", ("completions",), ON_CHAT, ("none", "auto")),
    Refused("functions", GENERATING, "use `tools` of /v1/chat/completions", ([],)),
    Refused("function_call", GENERATING, "use `tool_choice` of /v1/chat/completions", ("none", "auto")),
    Refused("web_search_options", GENERATING, "this server does not search the web"),
    Refused("moderation", GENERATING, "answers are not moderated"),
    Refused("best_of", ("chat",), "ask for `n` completions and choose", (1,)),
    Refused("best_of", ("responses",), ONE_ANSWER, (1,)),
    Refused("use_beam_search", GENERATING, BEAMS, (False,)),
    Refused("length_penalty", GENERATING, f"{BEAMS}, or steer the length with `length_guidance`", (1,)),
    Refused("early_stopping", GENERATING, BEAMS, (False,)),
    Refused("suffix", GENERATING, "the models only generate text after a prompt", ("",)),
    Refused("echo", ("chat", "responses"), "use /v1/completions", (False,)),
    Refused("modalities", GENERATING, TEXT, (["text"],)),
    Refused("audio", GENERATING, TEXT),
    Refused("image_data", GENERATING, "send `image_url` parts in `messages`", ([],)),
    Refused("mm_processor_kwargs", GENERATING, PIXELS, ({},)),
    Refused("verbosity", GENERATING, "steer the length with `length_guidance`", ("medium",)),
    Refused("typical_p", GENERATING, SAMPLERS, (1,)),
    Refused("top_a", GENERATING, SAMPLERS, (0,)),
    Refused("tfs", GENERATING, SAMPLERS, (1,)),
    Refused("tfs_z", GENERATING, SAMPLERS, (1,)),
    Refused("eta_cutoff", GENERATING, SAMPLERS, (0,)),
    Refused("epsilon_cutoff", GENERATING, SAMPLERS, (0,)),
    Refused("mirostat", GENERATING, SAMPLERS, (0,)),
    Refused("mirostat_mode", GENERATING, SAMPLERS, (0,)),
    Refused("dynatemp_range", GENERATING, SAMPLERS, (0,)),
    Refused("smoothing_factor", GENERATING, SAMPLERS, (0,)),
    Refused("xtc_probability", GENERATING, SAMPLERS, (0,)),
    Refused("dry_multiplier", GENERATING, "use `repetition_penalty`", (0,)),
    Refused("no_repeat_ngram_size", GENERATING, "use `repetition_penalty`", (0,)),
    Refused("max_repetition_pattern_size", GENERATING, "use `repetition_penalty`", (0,)),
    Refused("repetition_detection", GENERATING, "use `repetition_penalty`"),
    Refused("logits_processors", GENERATING, TOKENS, ([],)),
    Refused("custom_logit_processor", GENERATING, TOKENS),
    Refused("vllm_xargs", GENERATING, "it has no meaning here", ({},)),
    Refused("truncate", UNCUT, NEVER_CUT, (False,)),
    Refused("truncate_prompt_tokens", UNCUT, NEVER_CUT),
    Refused("lora_path", ALL, ADAPTERS),
    Refused("lora_name", ALL, ADAPTERS),
    Refused("lora_request", ALL, ADAPTERS),
    Refused("adapter_id", ALL, ADAPTERS),
    Refused("return_hidden_states", GENERATING, RAW_OUTPUT, (False,)),
    Refused("return_routed_experts", GENERATING, RAW_OUTPUT, (False,)),
    Refused("chat_template", ("chat", "responses", "length"), TEMPLATE),
    Refused("chat_template", ("score", "rerank", "classify", "embeddings"), "the model's preset is used"),
    Refused("add_generation_prompt", ("responses",), ON_CHAT, (True,)),
    Refused("continue_final_message", ("responses",), ON_CHAT, (False,)),
    Refused("add_special_tokens", ("responses",), ON_CHAT, (False,)),
    Refused("n", ("responses",), ONE_ANSWER, (1,)),
    Refused("messages", ("responses",), "use `input`"),
    Refused("logprobs", ("responses",), 'use `include`: `["message.output_text.logprobs"]`', (False,)),
    Refused("max_tokens", ("responses",), "use `max_output_tokens`"),
    Refused("max_completion_tokens", ("responses",), "use `max_output_tokens`"),
    Refused("reasoning_effort", ("responses",), EFFORT),
    Refused("enable_thinking", ("responses",), EFFORT),
    Refused("thinking", ("responses",), EFFORT),
    Refused("thinking_token_budget", ("responses",), ON_CHAT),
    Refused("prompt_logprobs", ("responses",), ON_CHAT),
    Refused("return_token_ids", ("responses",), ON_CHAT, (False,)),
    Refused("return_tokens_as_token_ids", ("responses",), ON_CHAT, (False,)),
    Refused("background", ("responses",), "responses are computed while the client waits; stream them", (False,)),
    Refused("conversation", ("responses",), "send `previous_response_id`, or the whole conversation as `input`"),
    Refused("prompt", ("responses",), "there are no stored prompts; send `instructions` and `input`"),
    Refused("max_tool_calls", ("responses",), "it limits built-in tools, and this server has none"),
    Refused("context_management", ("responses",), "use `truncation`", ([],)),
    Refused("documents", TEMPLATED, "write the documents into the messages", ([],)),
    Refused("add_generation_prompt", ("length",), UNRENDERED, (True,)),
    Refused("continue_final_message", ("length",), UNRENDERED, (False,)),
    Refused("prompt_embeds", GENERATING, AS_PROMPT),
    Refused("input_embeds", GENERATING, AS_PROMPT),
    Refused("input_ids", GENERATING, AS_PROMPT),
    Refused("session_params", GENERATING, "send the whole conversation; what it shares with earlier ones is cached"),
    Refused("max_new_tokens", MULTIPLE, "use `max_tokens`"),
    Refused("max_new_tokens", ("responses",), "use `max_output_tokens`"),
    Refused("n_predict", MULTIPLE, "use `max_tokens`", (-1,)),
    Refused("n_predict", ("responses",), "use `max_output_tokens`", (-1,)),
    Refused("num_predict", MULTIPLE, "use `max_tokens`", (-1,)),
    Refused("num_predict", ("responses",), "use `max_output_tokens`", (-1,)),
    Refused("min_new_tokens", GENERATING, "use `min_tokens`", (0,)),
    Refused("num_return_sequences", MULTIPLE, "use `n`", (1,)),
    Refused("num_return_sequences", ("responses",), ONE_ANSWER, (1,)),
    Refused("stop_sequences", GENERATING, "use `stop`", ([],)),
    Refused("stop_strings", GENERATING, "use `stop`", ([],)),
    Refused("do_sample", GENERATING, "use `temperature`, where 0 is greedy", (True,)),
    Refused("repeat_penalty", GENERATING, "use `repetition_penalty`", (1,)),
    Refused("sampling_seed", GENERATING, "use `seed`"),
    Refused("random_seed", GENERATING, "use `seed`"),
    Refused("no_stop_trim", GENERATING, "use `include_stop_str_in_output`", (False,)),
    Refused("parameters", GENERATING, TOP_LEVEL, ({},)),
    Refused("sampling_params", GENERATING, TOP_LEVEL, ({},)),
    Refused("options", GENERATING, TOP_LEVEL, ({},)),
    Refused("extra_body", ALL, TOP_LEVEL, ({},)),
    Refused("normalize", ("score",), "use `apply_softmax`"),
    Refused("rank_fields", ("rerank",), "send each document as one text", (["text"],)),
    Refused("top_k", ("rerank",), "use `top_n`"),
    Refused("messages", ("classify", "embeddings"), "send texts as `input`"),
    Refused("add_special_tokens", ("classify", "embeddings"), "send token ids for a prompt without special tokens", (True,)),
    Refused("use_activation", ("embeddings",), "use `normalize`", (True,)),
    Refused("normalized", ("embeddings",), "use `normalize`", (True,)),
    Refused("embed_dtype", ("embeddings",), FLOAT32, ("float32",)),
    Refused("output_dtype", ("embeddings",), FLOAT32, ("float",)),
    Refused("endianness", ("embeddings",), "`base64` is that of little-endian numbers", ("native", "little")),
    Refused("late_chunking", ("embeddings",), "each text has an embedding of its own", (False,)),
    Refused("return_documents", ("score",), "scores are in the order of the items", (False,)),
    Refused("return_text", ("score",), "scores are in the order of the items", (False,)),
    Refused("return_pooled_hidden_states", ("score",), "an answer holds scores", (False,)),
    Refused("chat_template", ("tokenize",), TEMPLATE),
    Refused("mm_processor_kwargs", ("score", "rerank", "classify", "embeddings"), PIXELS, ({},)),
    Refused("mm_processor_kwargs", ("tokenize",), TEXT, ({},)),
    Refused("media_io_kwargs", ("tokenize",), TEXT, ({},)),
    Refused("documents", ("tokenize",), "write the documents into the messages", ([],)),
    Refused("skip_special_tokens", ("detokenize",), "the text has its special tokens; leave them out of `tokens`", (False,)),
)

_IGNORED: dict[tuple[EndpointName, ...], tuple[str, ...]] = {
    ALL: ("metadata", "service_tier", "safety_identifier", "request_id", "rid"),
    GENERATING: (
        "store",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "separate_reasoning",
        "stream_reasoning",
        "spaces_between_special_tokens",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "return_cached_tokens_details",
    ),
    ("completions",): ("parallel_tool_calls", "include_reasoning"),
    UNCUT: ("truncation_direction", "truncation_side"),
}
IGNORED = tuple(Ignored(name, endpoints) for endpoints, names in _IGNORED.items() for name in names)


@cache
def variant(kind: type[msgspec.Struct], extras: tuple[str, ...] = (), *, strict: bool) -> type[msgspec.Struct]:
    """Return a subclass of ``kind`` to decode into.

    Each name in ``extras`` becomes a field with the raw JSON of the value, or ``UNSET``. ``strict``: unknown fields are errors, in
    nested structs too. Pickling an instance gives an instance of ``kind``.
    """
    if kind.__struct_config__.forbid_unknown_fields:
        return kind
    fields: list[Any] = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in extras]
    if strict:
        fields += _strict_fields(kind)
    names = tuple(field.name for field in msgspec.structs.fields(kind))

    def reduce(instance: msgspec.Struct) -> tuple[Any, ...]:
        return _rebuilt, (kind, [(name, getattr(instance, name)) for name in names])

    return msgspec.defstruct(
        kind.__name__,
        fields,
        bases=(kind,),
        module=kind.__module__,
        namespace={"__reduce__": reduce},
        kw_only=True,
        forbid_unknown_fields=strict,
    )


def _rebuilt(kind: type[msgspec.Struct], fields: Iterable[tuple[str, Any]]) -> msgspec.Struct:
    return kind(**dict(fields))


def _strict_fields(kind: type[msgspec.Struct]) -> list[Any]:
    """Return the fields of ``kind`` that hold structs, with strict variants of those structs."""
    found: list[Any] = []
    for field in msgspec.structs.fields(kind):
        annotation = _strict(field.type)
        if annotation == field.type:
            continue
        if field.required:
            found.append((field.name, annotation))
        else:
            assert field.default is not msgspec.NODEFAULT, "a field that holds structs has a plain default"
            found.append((field.name, annotation, field.default))
    return found


def _strict(annotation: Any) -> Any:
    """Return ``annotation`` with each struct replaced by its strict variant."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and origin is None:
        return variant(annotation, strict=True) if issubclass(annotation, msgspec.Struct) else annotation
    if origin is None or origin is Literal:
        return annotation
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        return Annotated[(_strict(inner), *notes)]
    parts = tuple(map(_strict, get_args(annotation)))
    return Union[parts] if origin in (Union, UnionType) else origin[parts]  # noqa: UP007 - the parts are not known before


SEARCHED_BYTES = 64 << 10
"""Longest body that is searched for unknown fields. The second decoding and the search take at most 3 ms."""
MAX_IGNORED = 32
"""Most names that are returned."""
MIN_NAME = 7
"""Fewest characters of a name with a wrong character. Shorter names of other servers, such as ``texts``, are too near to ours."""
_MAX_ACCEPTED_BYTES = 64
"""Longest JSON of a value that is compared with :attr:`Refused.accepts`; a longer one is not decoded."""

T = TypeVar("T", bound=Parameters)

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"[^.\[\]]+")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.+)`")
_KEY_BEFORE = re.compile(rb'"([^"\\]+)"\s*:\s*-?$')


class BodyDecoder(Generic[T]):
    """Decodes bodies of one type. An instance keeps no state of a request and does not depend on HTTP."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        declared = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        self._refused = {row.name: row for row in REFUSED if kind.endpoint in row.endpoints and row.name not in declared}
        ignored = [row.name for row in IGNORED if kind.endpoint in row.endpoints and row.name not in declared]
        self._extras = (*self._refused, *ignored)
        assert len(set(self._extras)) == len(self._extras), "a parameter has one row for each endpoint"
        self._known = declared.keys() | set(self._extras)
        self._declared = declared
        self._own = {
            field.encode_name: (f"{name}.{field.encode_name}", field.type)
            for name, type in declared.items()
            for own in _own_objects(type)
            for field in msgspec.structs.fields(own)
            if field.encode_name not in self._known
        }
        """Fields of the objects that refuse unknown ones: path and type of each."""
        types = {field.encode_name: field.type for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        self._shapes = {name: shape for name, type in types.items() if (shape := _shape(type))}
        self._strict = msgspec.json.Decoder(variant(kind, strict=True))
        self._lenient = msgspec.json.Decoder(variant(kind, self._extras, strict=False))

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """Return the request and the names of ignored fields, at most ``MAX_IGNORED``. Raises :class:`InvalidRequest`."""
        if not body:
            raise InvalidRequest("The request body is empty; send a JSON object.")
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            raise _located(str(error), self._kind) from None
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The request body is not valid JSON: {_reason(body, error)}.", param=_key(body, error)) from None
        except UnicodeDecodeError:
            raise InvalidRequest("The request body is not valid UTF-8; encode it as UTF-8.") from None
        except RecursionError:
            raise InvalidRequest("The request body is nested too deeply.") from None

    def _decode(self, body: bytes) -> tuple[Any, list[str]]:
        searched = len(body) <= SEARCHED_BYTES
        if searched:
            try:
                return self._strict.decode(body), []
            except msgspec.ValidationError as error:
                if not _UNKNOWN.match(str(error)):
                    raise
        given = self._lenient.decode(body)
        ignored = self._unsupported(given)
        request = self._kind(**{name: getattr(given, name) for name in self._kind.__struct_fields__})
        if searched:
            ignored += self._search(body)
        elif self._own:
            self._check_names(_members.decode(body))
        return request, ignored[:MAX_IGNORED]

    def _check_names(self, members: dict[str, msgspec.Raw]) -> None:
        """Raise :class:`InvalidRequest` for a misspelt or misplaced field. members: fields of the body."""
        for name in islice((name for name in members if name not in self._known), MAX_IGNORED):
            if name in self._own:
                path, type = self._own[name]
            else:
                path = nearest(name, (*self._declared, *self._own)) or ""
                path, type = self._own.get(path, (path, self._declared.get(path)))
            if path and _fits(members[name], type):
                raise InvalidRequest(f"There is no field `{name}`; did you mean `{path}`?", param=name)

    def _unsupported(self, request: msgspec.Struct) -> list[str]:
        """Return the ignored fields of the tables. Raises :class:`InvalidRequest` for a refused field."""
        values = ((name, getattr(request, name)) for name in self._extras)
        given = [(name, raw) for name, raw in values if raw is not msgspec.UNSET]
        for name, raw in given:
            if name in self._refused and not _accepted(self._refused[name], raw):
                raise InvalidRequest(self._refused[name].message, param=name)
        return [name for name, _ in given if name not in self._refused]

    def _search(self, body: bytes) -> dict[str, None]:
        """Return the paths of unknown fields, those at the top level first. Fields that hold no objects are not decoded."""
        members = _members.decode(body)
        self._check_names(members)
        found = dict.fromkeys(islice((name for name in members if name not in self._known), MAX_IGNORED))
        for name, raw in members.items():
            if name in self._shapes:
                _find_unknown(self._shapes[name], msgspec.json.decode(raw), name, found)
        return found


def _own_objects(annotation: Any) -> Iterator[Any]:
    """Yield the structs in ``annotation``, outside of lists, that refuse unknown fields."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        if annotation.__struct_config__.forbid_unknown_fields:
            yield annotation
    elif getattr(annotation, "__origin__", None) not in (list, dict):
        for part in get_args(annotation):
            yield from _own_objects(part)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that ``name`` is but for case, `_`, `-` and one wrong, missing, added or exchanged character;
    None if there is none."""
    plain = _plain(name)
    long = len(plain) >= MIN_NAME
    return next((each for each in known if (other := _plain(each)) == plain or (long and _is_one_edit(plain, other))), None)


def _is_one_edit(one: str, other: str) -> bool:
    if abs(len(one) - len(other)) > 1:
        return False
    at = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    left, right = one[at:], other[at:]
    swapped = left[:2] == right[:2][::-1] and left[2:] == right[2:]
    return left[1:] == right[1:] or left == right[1:] or left[1:] == right or swapped


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _fits(raw: msgspec.Raw, type: Any) -> bool:
    """Whether the JSON ``raw`` is a value of ``type``, or an object in place of one, and not null."""
    if bytes(memoryview(raw)[:1]) == b"{" and _shape(inspect.type_info(type)) is not None:
        return True
    try:
        return msgspec.json.decode(raw, type=type) is not None
    except (msgspec.ValidationError, RecursionError):
        return False


def _accepted(row: Refused, raw: msgspec.Raw) -> bool:
    """Whether the JSON ``raw`` requests the behaviour that the server has anyway."""
    if memoryview(raw).nbytes > _MAX_ACCEPTED_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return value is None or value in row.accepts


@dataclass(frozen=True)
class _Shape:
    """The places of a value in which unknown fields may occur."""

    fields: dict[str, _Shape | None] | None = None
    """For an object: its known fields, and the shapes of those that hold objects."""
    items: _Shape | None = None
    """For a list: the shape of its items."""


def _shape(kind: inspect.Type) -> _Shape | None:
    """Return the shape of ``kind``; None if a value of it holds no objects with known fields."""
    if isinstance(kind, inspect.StructType):
        tag: dict[str, _Shape | None] = {} if kind.tag_field is None else {kind.tag_field: None}
        return _Shape(tag | {field.encode_name: _shape(field.type) for field in kind.fields})
    if isinstance(kind, inspect.ListType):
        items = _shape(kind.item_type)
        return items and _Shape(items=items)
    parts = [shape for part in kind.types if (shape := _shape(part))] if isinstance(kind, inspect.UnionType) else []
    if not parts:
        return None
    fields = dict(pair for part in parts if part.fields is not None for pair in part.fields.items())
    return _Shape(fields or None, next((part.items for part in parts if part.items is not None), None))


def _find_unknown(shape: _Shape, value: Any, path: str, found: dict[str, None]) -> None:
    """Add paths of unknown fields in ``value``, up to :data:`MAX_IGNORED`. Positions are left out: ``messages[].foo``."""
    if isinstance(value, list) and shape.items is not None:
        for inner in value:
            _find_unknown(shape.items, inner, f"{path}[]", found)
    elif isinstance(value, dict) and shape.fields is not None:
        for name, inner in value.items():
            if len(found) >= MAX_IGNORED:
                return
            if name not in shape.fields:
                if "." not in path and "[" not in path and inner is not None and (near := nearest(name, shape.fields)):
                    message = f"`{path}` has no field `{name}`; did you mean `{path}.{near}`?"
                    raise InvalidRequest(message, param=f"{path}.{name}")
                found[f"{path}.{name}"] = None
            elif (below := shape.fields[name]) is not None:
                _find_unknown(below, inner, f"{path}.{name}", found)


def _reason(body: bytes, error: msgspec.DecodeError) -> str:
    """Return msgspec's reason, unless the bytes are not UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    reason = str(error).removeprefix("JSON is malformed: ")
    return f"{reason[:1].lower()}{reason[1:]}" + ("; JSON has no NaN or Infinity" if "invalid character" in reason else "")


def _key(body: bytes, error: msgspec.DecodeError) -> str | None:
    """Return the key of a value that is not valid JSON, such as NaN; None for other errors."""
    at = re.search(r"invalid character \(byte (\d+)\)$", str(error))
    found = _KEY_BEFORE.search(body, max(0, int(at[1]) - 100), int(at[1])) if at else None
    return found[1].decode(errors="replace") if found else None


def _located(message: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    """Convert ``Expected `int`, got `str` - at `$.items[3]``` to an error whose ``param`` is ``items[3]``."""
    found = _AT.search(message)
    if found is None:
        missing = re.search(r"missing required field `(.+?)`", message)
        return InvalidRequest(f"{message}.", param=missing[1] if missing else None)
    where = found["path"]
    whole, path = inspect.type_info(kind), _STEP.findall(where)
    what = message[: found.start()]
    if unknown := _UNKNOWN.match(what):
        structs = [each for each in _types_at(whole, path) if isinstance(each, inspect.StructType)]
        near = nearest(unknown[1], (field.encode_name for each in structs for field in each.fields))
        hint = f"; did you mean `{where}.{near}`?" if near else "."
        return InvalidRequest(f"`{where}` has no field `{unknown[1]}`{hint}", param=f"{where}.{unknown[1]}")
    if what.startswith("Expected `null`, got"):
        return InvalidRequest(f"`{where}` is not supported; leave it out.", param=where)
    if what.startswith(("Invalid enum value", "Invalid value")):
        parents = [each for each in _types_at(whole, path[:-1]) if isinstance(each, inspect.StructType)]
        tags = [each.tag for each in parents if each.tag_field == path[-1]]
        words = [word for each in _types_at(whole, path) if isinstance(each, inspect.LiteralType) for word in each.values]
        what += f"; it is one of {', '.join(repr(word) for word in (*tags, *words))}"
    subject = f"A key of `{where}`" if found["key"] else f"`{where}`"
    return InvalidRequest(f"{subject}: {what[:1].lower()}{what[1:]}.", param=where)


def _types_at(kind: inspect.Type, path: list[str]) -> list[inspect.Type]:
    """Return the types that a ``kind`` may have at ``path``, none of them a union."""
    if isinstance(kind, inspect.UnionType):
        return [found for part in kind.types for found in _types_at(part, path)]
    if not path:
        return [kind]
    if isinstance(kind, inspect.StructType):
        return [found for field in kind.fields if field.encode_name == path[0] for found in _types_at(field.type, path[1:])]
    return _types_at(kind.item_type, path[1:]) if isinstance(kind, inspect.ListType) else []
