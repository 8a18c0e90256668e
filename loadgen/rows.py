"""Converts rows of a file to parts of bodies, as JSON. A wrong row is a :class:`ValueError` with the reason."""

from __future__ import annotations

import msgspec

from loadgen.data import Row


def query_and_items(row: Row) -> tuple[bytes, bytes, int]:
    """Return the query, the items without brackets, and their number."""
    if row.query is None or not row.items:
        raise ValueError("it has no `query` with `items`; add both")
    return msgspec.json.encode(row.query), msgspec.json.encode(row.items)[1:-1], len(row.items)


def texts_to_embed(row: Row) -> tuple[bytes, int]:
    """Return the texts without brackets, and their number."""
    texts = row.items or ([row.prompt] if row.prompt is not None else [])
    if not texts:
        raise ValueError("it has neither `items` nor `prompt`; add one")
    return msgspec.json.encode(texts)[1:-1], len(texts)


def prompt(row: Row) -> bytes:
    """Return the prompt: a text, or token ids."""
    if not row.prompt:
        raise ValueError("it has no `prompt`; add it")
    return msgspec.json.encode(row.prompt)


def single(row: Row) -> tuple[bytes, tuple[bytes, ...]]:
    """Return all messages of a row as one request, without later texts."""
    return (msgspec.json.encode(row.messages)[1:-1], ()) if row.messages else conversation(row)


def conversation(row: Row) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the messages until the first of the user, and the user's later texts. Answers of the file are left out."""
    if not row.messages:
        if not isinstance(row.prompt, str):
            raise ValueError("it has neither `messages` nor `prompt` with a text; add one")
        return message("user", msgspec.json.encode(row.prompt)), ()
    users = [place for place, each in enumerate(row.messages) if each.get("role") == "user"]
    if not users:
        raise ValueError("its `messages` have none of the role `user`; add one")
    later = tuple(msgspec.json.encode(row.messages[place].get("content")) for place in users[1:])
    return msgspec.json.encode(row.messages[: users[0] + 1])[1:-1], later


def message(role: str, content: bytes) -> bytes:
    """Return one message. ``content``: a JSON string."""
    return b'{"role":"%b","content":%b}' % (role.encode(), content)
