"""``/v1/responses``: the items of a conversation to token ids, through the messages of a chat request."""

from __future__ import annotations

import msgspec

from gateway.errors import ContextExceeded, InvalidRequest
from gateway.reading.chat import read_chat
from gateway.reading.endpoint import Endpoint, Model
from gateway.responses.items import as_chat, check_call_ids, items_of, messages_of, renamed
from gateway.schemas.chat import ChatMessage
from gateway.schemas.responses import InputItem, ResponseRequest
from gateway.schemas.structure import BULK
from gateway.text.prepared import Items, Prepared

ROOM_SHARE = 4
"""With `truncation` "auto", a part of the context stays free for the answer: `max_output_tokens`, or at least one of this many."""

_items = msgspec.json.Decoder(list[InputItem])
_encoder = msgspec.json.Encoder()


def _read(request: ResponseRequest, model: Model) -> Prepared:
    own = items_of(request)
    if not own and not model.earlier:
        raise InvalidRequest("`input` is empty; send a text or at least one item.", param="input")
    earlier = _items.decode(b"[%b]" % model.earlier) if model.earlier else []
    check_call_ids(earlier, own)
    items = [*earlier, *own]
    messages = messages_of(items)
    try:
        prepared = _fitted(request, messages, model)
    except InvalidRequest as error:
        raise renamed(error) from None
    prepared.param = "input"
    prepared.response = memoryview(_encoder.encode(request.instructions))
    if request.store:
        prepared.items = Items.of((item.id or "", _encoder.encode(item)) for item in own)
    return prepared


def _fitted(request: ResponseRequest, messages: list[ChatMessage], model: Model) -> Prepared:
    """Read the messages; with `truncation` "auto", as many of the newest as fit. Raises :class:`InvalidRequest`."""

    def read(left_out: int) -> Prepared:
        instructions = [] if request.instructions is None else [ChatMessage("system", request.instructions)]
        return read_chat(as_chat(request, [*instructions, *messages[left_out:]]), model)

    if request.truncation != "auto":
        return read(0)
    context = model.facts.context
    room = min(request.max_output_tokens or context // ROOM_SHARE, context // 2)

    def fitting(left_out: int) -> Prepared | None:
        try:
            prepared = read(left_out)
        except ContextExceeded:
            return None
        return prepared if len(prepared.rows[0]) + room <= context else None

    if (whole := fitting(0)) is not None:
        return whole
    begins = [place for place, message in enumerate(messages) if place and message.role != "tool"]
    low, high, found = 0, len(begins), None
    while low < high:
        middle = (low + high) // 2
        if (prepared := fitting(begins[middle])) is not None:
            high, found = middle, prepared
        else:
            low = middle + 1
    if found is None:
        return read(begins[-1] if begins else 0)
    found.truncated = list(range(begins[low]))
    return found


RESPONSES = Endpoint(
    kind=ResponseRequest,
    bulk={"input": "", "instructions": "", "chat_template_kwargs": {}, **BULK},  # the response repeats the other fields
    read=_read,
    is_light=lambda _: False,
    characters=lambda request, _: _characters(request),
)


def _characters(request: ResponseRequest) -> int:
    if isinstance(request.input, str):
        return len(request.input) + len(request.instructions or "")
    return len(request.instructions or "")
