"""One sequence's text does not depend on how the engine cuts it into deltas."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ids, library
from yardstick_llm.engine import wire
from yardstick_llm.gateway.generation.sequence import Piece, Sequence, TextOptions
from yardstick_llm.gateway.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(library())
END = library().token_to_id("<|im_end|>")


def deltas(tokens: list[int], cuts: list[int], finish: Any) -> list[wire.Delta]:
    """``tokens`` cut at ``cuts``; a token's log-probability is minus its place."""
    bounds = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    spans = list(pairwise(bounds)) or [(0, 0)]
    return [
        wire.Delta(
            "x",
            start,
            tokens[start:end],
            0,
            wire.Logprobs([-float(place) for place in range(start, end)], [[]] * (end - start), [[]] * (end - start)),
            finish if end == len(tokens) else None,
        )
        for start, end in spans
    ]


def run(sequence: Sequence, told: list[wire.Delta]) -> Piece:
    """All pieces as one."""
    pieces = [sequence.push(delta) for delta in told]
    (finish,) = (piece.finish for piece in pieces if piece.finish)
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(0, "".join(piece.text for piece in pieces), tokens, finish)


@given(
    text=st.text(alphabet="ab fox🦊é東", max_size=30),
    stops=st.lists(st.text(alphabet="ab fox🦊é東", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    logprobs=st.booleans(),
    keeps_stop=st.booleans(),
    finish=st.sampled_from(["stop", "length"]),
)
def test_cuts_do_not_matter(text: str, stops: list[str], cuts: list[int], logprobs: bool, keeps_stop: bool, finish: Any) -> None:
    tokens = ids(text) + ([END] if finish == "stop" else [])
    options = TextOptions(logprobs=logprobs, stops=stops, keeps_stop=keeps_stop)
    sequence = Sequence(0, TOKENIZER, [], options)
    told = run(sequence, deltas(tokens, cuts, finish))
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    if found:
        end, start = min(found)
        assert (told.text, sequence.finish) == (text[: end if keeps_stop else start], "stop")
    else:
        assert (told.text, sequence.finish) == (text, finish)
        assert sequence.completion_tokens == len(tokens)
    assert [token.offset for token in told.tokens] == sorted(token.offset for token in told.tokens)
    whole = Sequence(0, TOKENIZER, [], options)
    assert run(whole, deltas(tokens, [], finish)) == told
    assert whole.completion_tokens == sequence.completion_tokens
    if logprobs and not found and not keeps_stop:
        assert [token.id for token in told.tokens] == ids(text)
    for token in told.tokens:
        assert token.offset < max(1, len(told.text)) or not found


def test_an_unfinished_character_is_told_at_the_end() -> None:
    sequence = Sequence(0, TOKENIZER, [], TextOptions())
    half = ids("🦊")[:2]
    assert sequence.push(wire.Delta("x", 0, half)).text == ""
    assert sequence.push(wire.Delta("x", 2, [], finish="length")).text == "\ufffd"


@given(st.text(max_size=20), st.lists(st.integers(1, 5), max_size=5), st.sampled_from([(), ("e",)]), st.booleans())
def test_text_alone_is_that_of_a_piece(text: str, cuts: list[int], stops: tuple[str, ...], logprobs: bool) -> None:
    plain, other = (Sequence(0, TOKENIZER, [], TextOptions(stops=stops, logprobs=logprobs)) for _ in range(2))
    for delta in deltas(ids(text), cuts, "length"):
        piece = other.push(delta)
        if (found := plain.push_quoted(delta)) is None:
            assert stops or logprobs or delta.finish or len(delta.tokens) != 1 or not library().decode(delta.tokens).isascii()
            assert plain.push(delta) == piece
        else:
            said = msgspec.json.decode(found) if found else ""
            assert Piece(0, said, completion_tokens=plain.completion_tokens) == piece
