"""Prompt formats of the demo models. They are plain strings, simple enough to write by hand; README.md shows them.

A relevance prompt is a query part and an item part, one after the other, answered by one of :data:`LABELS`::

    Query: red running shoes
    Item: crimson jogging sneakers
    Relevant:

The item part may also end with the item itself, as a plain line of a file does (``score_item(item, short=True)``).
"""

from __future__ import annotations

START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
"""The tokeniser's special tokens. ``END`` closes a chat message and ends every text."""

LABELS = (" Yes", " No")
"""Each is one token; so are ``Yes`` and ``No``."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def score_query(query: str) -> str:
    """Return the part of a relevance prompt that all items share."""
    return f"Query: {query}\nItem: "


def score_item(item: str, *, short: bool = False) -> str:
    """Return the part of a relevance prompt that differs between items."""
    return item if short else f"{item}\nRelevant:"


def describe(product: str) -> str:
    """Return the request for a description; as a completion prompt it may end in a newline or not."""
    return f"Describe: {product}"


def chat(message: str, *, system: str | None = None) -> str:
    """Render a user's message like :data:`CHAT_TEMPLATE`."""
    turns = ([("system", system)] if system is not None else []) + [("user", message)]
    return "".join(f"{START}{role}\n{text}{END}\n" for role, text in turns) + f"{START}assistant\n"
