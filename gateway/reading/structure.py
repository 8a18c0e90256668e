"""The constraints of a generation that need the model's tokeniser: grammars and words that must not occur."""

from __future__ import annotations

from engine.wire import GRAMMAR_BOUNDS
from gateway.errors import InvalidRequest
from gateway.output.constraint import OutputConstraint, constraint_of, grammar_of
from gateway.process.deadline import TimeIsUp, at_most
from gateway.reading.endpoint import Model
from gateway.schemas.structure import StructuredRequest

MAX_WORD_TOKENS = 4096
"""Most tokens of all ``bad_words``, each with and without a space."""


def is_constrained(request: StructuredRequest) -> bool:
    """Whether :func:`read_grammar` or :func:`read_bad_words` needs a worker."""
    return bool(request.bad_words) or constraint_of(request) is not None


def read_grammar(request: StructuredRequest, model: Model) -> str:
    """Return the grammar that the output of ``request`` follows, which compiles; empty if there is none. Raises
    :class:`InvalidRequest`."""
    constraint = constraint_of(request)
    return "" if constraint is None else compiled(constraint, model)


def compiled(constraint: OutputConstraint, model: Model) -> str:
    """Return the grammar of ``constraint``, which compiles. Raises :class:`InvalidRequest`."""
    try:
        with at_most(GRAMMAR_BOUNDS.seconds):
            grammar = grammar_of(constraint)
    except TimeIsUp:
        message = f"`{constraint.param}`: reading it takes longer than {GRAMMAR_BOUNDS.seconds:g} s; simplify it."
        raise InvalidRequest(message, param=constraint.param) from None
    if model.texts.grammars is not None:
        model.texts.grammars.check(grammar, constraint.param)
    return grammar


def read_bad_words(request: StructuredRequest, model: Model) -> list[list[int]]:
    """Return the tokens of each of ``bad_words``, as it is spelled within a text and after a space. Raises
    :class:`InvalidRequest`."""
    found: list[list[int]] = []
    for index, word in enumerate(request.bad_words or ()):
        param = f"bad_words[{index}]"
        spelled = word.lstrip()
        if not spelled:
            raise InvalidRequest(f"`{param}` is empty.", param=param)
        for text in (spelled, f" {spelled}"):
            ids = model.texts.tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
            found += [ids] if ids not in found[-1:] else []
    if (count := sum(map(len, found))) > MAX_WORD_TOKENS:
        raise InvalidRequest(f"`bad_words` have {count} tokens; at most {MAX_WORD_TOKENS} are allowed.", param="bad_words")
    return found
