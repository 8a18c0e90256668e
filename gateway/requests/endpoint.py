"""The common parts of reading the bodies of all endpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.output.answer import Formats
from yardstick_llm.gateway.output.constraint import GrammarCompiler
from yardstick_llm.gateway.schemas.generation import BULK as CONSTRAINTS
from yardstick_llm.gateway.schemas.parameters import BodyDecoder, Parameters
from yardstick_llm.gateway.text.chat_template import ChatTemplate
from yardstick_llm.gateway.text.prepared import Bounds, Facts, Prepared
from yardstick_llm.gateway.text.preset_template import PresetTemplate
from yardstick_llm.gateway.text.tokenizer import Tokenizer
from yardstick_llm.gateway.text.vocabulary import Vocabulary

T = TypeVar("T", bound=Parameters)

UNBOUNDED = (*CONSTRAINTS, "text", "tools", "tool_choice", "chat_template_kwargs")
"""Fields whose cost is not bounded by their size: grammars are compiled of them, and chat templates do with them what they like.
The field ``text`` of ``/v1/responses`` has a schema."""
MAX_FIELDS_BYTES = 1 << 18
"""Most bytes of the fields of a request other than its bulk, unless it may name items of a catalogue."""


@dataclass(frozen=True)
class TextSide:
    """Tokeniser, chat template, compiler of grammars and preset of one model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    preset: PresetTemplate | None = None
    grammars: GrammarCompiler | None = None
    """None for a tokeniser that cannot be used for grammars. Engines check every grammar in any case."""


@dataclass(slots=True)
class Model:
    """The model that a request is read for."""

    facts: Facts
    vocabulary: Vocabulary
    bounds: Bounds
    text: TextSide | None = None
    """None where the event loop reads token ids."""
    formats: Formats = field(default_factory=Formats)
    earlier: bytes = b""
    """Input of a request besides its body: the items of the conversation that it continues, as JSON values with commas between
    them, or the catalogue that it names (``catalogue.py``)."""
    fetched: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of the images that the request names with ``http`` and ``https`` URLs."""

    @property
    def texts(self) -> TextSide:
        """The tokeniser and template, which a request of texts needs."""
        assert self.text is not None, "the event loop reads token ids without them"
        return self.text


@dataclass(frozen=True)
class Endpoint(Generic[T]):
    """The functions that read the bodies of one endpoint."""

    kind: type[T]
    bulk: Mapping[str, Any]
    """Fields that may be large and that the event loop does not need, with the stand-in that replaces each non-empty one, or a
    function that returns it."""
    read: Callable[[T, Model], Prepared]
    """Returns the prompts. Raises :class:`InvalidRequest`."""
    characters: Callable[[T, bool], int]
    """Approximate number of characters that ``read`` tokenises. The flag says whether the tokeniser has safe cuts."""
    is_light: Callable[[T], bool] = lambda _: False
    """Whether ``read`` needs no texts and at most about a millisecond."""
    urls: Callable[[T], dict[str, str]] = lambda _: {}
    """The ``http`` and ``https`` URLs of a request's images, and the first field with each."""
    least_items: int = 0
    """Items that every request with images has."""
    most_fields_bytes: int = MAX_FIELDS_BYTES
    """Most bytes of the fields of a request other than its bulk."""

    def __post_init__(self) -> None:
        assert self.bulk.keys() <= set(self.kind.__struct_fields__), f"{self.kind.__name__} lacks a field of its bulk"

    @cached_property
    def _decoder(self) -> BodyDecoder[T]:
        return BodyDecoder(self.kind)

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """Return the request and the names of ignored fields. Raises :class:`InvalidRequest`."""
        return self._decoder.decode(body)

    def unbounded(self, request: T) -> bytes:
        """Return a digest of the :data:`UNBOUNDED` fields in the request; empty if it has none."""
        given = {name: value for name in UNBOUNDED if (value := getattr(request, name, None))}
        return hashlib.blake2b(msgspec.json.encode(given), digest_size=16).digest() if given else b""

    def pack_fields(self, request: T) -> bytes:
        """Encode the request, with stand-ins for its bulk fields, for another process. Raises :class:`InvalidRequest` if the result
        is large."""
        given = {name: value for name in self.bulk if (value := getattr(request, name))}
        present = {name: stand_in(given[name]) if callable(stand_in := self.bulk[name]) else stand_in for name in given}
        fields = msgspec.structs.replace(request, **present)
        try:
            packed = msgspec.msgpack.encode(fields)
        except OverflowError:
            raise InvalidRequest("A number in the request is larger than 64 bits.") from None
        if len(packed) > self.most_fields_bytes:
            sizes = {name: len(msgspec.msgpack.encode(getattr(fields, name))) for name in fields.__struct_fields__}
            largest = max(sizes, key=sizes.__getitem__)
            most = f"the fields of a request may have {self.most_fields_bytes} bytes besides its texts"
            raise InvalidRequest(f"`{largest}` is too large: {sizes[largest]} bytes; {most}.", param=largest)
        return packed

    def unpack_fields(self, packed: bytes) -> T:
        """Decode the result of :meth:`pack_fields`."""
        return msgspec.msgpack.decode(packed, type=self.kind)
