"""The parts that reading has for every endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from gateway.errors import InvalidRequest
from gateway.schemas.decoding import BodyDecoder
from gateway.schemas.parameters import Parameters
from gateway.text.bounds import Bounds
from gateway.text.chat_template import ChatTemplate
from gateway.text.facts import Facts
from gateway.text.prepared import Prepared
from gateway.text.tokenizer import Tokenizer
from gateway.text.vocabulary import Vocabulary

T = TypeVar("T", bound=Parameters)

MAX_FIELDS_BYTES = 1 << 18
"""Of the fields of a request besides its bulk."""


@dataclass(frozen=True)
class TextSide:
    """What turns texts for one model into token ids."""

    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(slots=True)
class Model:
    """The model that a request is read for."""

    facts: Facts
    vocabulary: Vocabulary
    bounds: Bounds
    text: TextSide | None = None
    """None on the event loop, where only token ids are read."""

    @property
    def texts(self) -> TextSide:
        """Where texts are read."""
        assert self.text is not None, "texts are read in worker processes"
        return self.text


@dataclass(frozen=True)
class Endpoint(Generic[T]):
    """How the bodies of one endpoint are read."""

    kind: type[T]
    bulk: Mapping[str, Any]
    """Fields that may be large and that the event loop does not need, and what stands for each where it is not empty."""
    read: Callable[[T, Model], Prepared]
    """The prompts. Raises :class:`InvalidRequest`."""
    is_light: Callable[[T], bool]
    """Whether ``read`` needs neither texts nor more than a millisecond."""
    characters: Callable[[T, bool], int]
    """How much text ``read`` has to tokenise, about. The flag says whether a query is tokenised once."""

    def __post_init__(self) -> None:
        assert self.bulk.keys() <= set(self.kind.__struct_fields__), f"{self.kind.__name__} lacks a field of its bulk"

    @cached_property
    def _decoder(self) -> BodyDecoder[T]:
        return BodyDecoder(self.kind)

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """The request and the names of ignored fields. Raises :class:`InvalidRequest`."""
        return self._decoder.decode(body)

    def without_bulk(self, request: T) -> T:
        """The fields that the event loop needs."""
        present = {name: stand_in for name, stand_in in self.bulk.items() if getattr(request, name)}
        return msgspec.structs.replace(request, **present)

    def pack_fields(self, request: T) -> bytes:
        """``without_bulk`` for another process. Raises :class:`InvalidRequest` where it is large."""
        fields = self.without_bulk(request)
        try:
            packed = msgspec.msgpack.encode(fields)
        except OverflowError:
            raise InvalidRequest("A number in the request is larger than 64 bits.") from None
        if len(packed) > MAX_FIELDS_BYTES:
            sizes = {name: len(msgspec.msgpack.encode(getattr(fields, name))) for name in fields.__struct_fields__}
            largest = max(sizes, key=sizes.__getitem__)
            raise InvalidRequest(f"`{largest}` is too large: {sizes[largest]} bytes.", param=largest)
        return packed

    def unpack_fields(self, packed: bytes) -> T:
        """From another process."""
        return msgspec.msgpack.decode(packed, type=self.kind)
