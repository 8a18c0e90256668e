"""A stream of tokens reads as the whole does, no character is ever split, and stop strings end it as in the whole text."""

import time

from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.text.conftest import bytes_of
from yardstick_llm.gateway.text.tokenizer import Tokenizer
from yardstick_llm.gateway.text.vocabulary import Detokenizer, StopStrings

IDS = st.lists(st.integers(0, 520), max_size=30)


@given(ids=IDS, skip=st.booleans(), data=st.data())
def test_the_stream_joined_is_the_whole(tokenizer: Tokenizer, ids: list[int], skip: bool, data: st.DataObject) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    told, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        told += detokenizer.push(rest[:size])
        rest = rest[size:]
    assert told + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(prompt=IDS, ids=IDS)
def test_it_tells_what_the_tokens_add_to_the_prompt(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    before = b"".join(map(tokenizer.spellings(skip_special_tokens=True).__getitem__, prompt))
    whole, alone = tokenizer.decode([*prompt, *ids]), tokenizer.decode(prompt)
    detokenizer = Detokenizer(tokenizer, prompt)
    told = "".join(detokenizer.push([id]) for id in ids) + detokenizer.finish()
    if before.decode("utf-8", "ignore").encode() == before:
        assert alone + told == whole
    else:  # the prompt ends within a character, or is not text at all
        assert whole.endswith(told)


def test_a_character_begun_by_the_prompt_is_told_whole(byte_tokenizer: Tokenizer) -> None:
    tokenizer = byte_tokenizer
    ids = tokenizer.encode("red 𓀀!")
    cut = next(index for index, id in enumerate(ids) if bytes_of(tokenizer, id).endswith(b"\xf0")) + 1
    detokenizer = Detokenizer(tokenizer, ids[:cut])
    assert detokenizer.push(ids[cut:]) == "𓀀!"


def test_the_space_before_the_first_word_is_the_tokenisers_own_only_at_the_start(space_tokenizer: Tokenizer) -> None:
    tokenizer = space_tokenizer
    ids = tokenizer.encode("red shoes", add_special_tokens=False)
    start = Detokenizer(tokenizer)
    assert start.push(ids) == "red shoes"
    after = Detokenizer(tokenizer, tokenizer.encode("big"))
    assert after.push(ids) == " red shoes"


def test_a_broken_character_becomes_one_replacement_and_spares_its_neighbours(
    byte_tokenizer: Tokenizer, space_tokenizer: Tokenizer
) -> None:
    for tokenizer in (byte_tokenizer, space_tokenizer):
        (lead,) = [id for id in range(tokenizer.vocab_size) if bytes_of(tokenizer, id) == b"\xe6"]
        detokenizer = Detokenizer(tokenizer)
        told = detokenizer.push([*tokenizer.encode("é"), lead])
        assert told == "é"
        assert detokenizer.push(tokenizer.encode("red", add_special_tokens=False)[-1:]).startswith("\ufffd")
        assert detokenizer.push([lead]) == ""
        assert detokenizer.finish() == "\ufffd"


def test_a_token_costs_the_same_wherever_it_stands(byte_tokenizer: Tokenizer) -> None:
    (lead,) = [id for id in range(256 + 4) if bytes_of(byte_tokenizer, id) == b"\xe6"]

    def seconds(tokens: int) -> float:
        detokenizer = Detokenizer(byte_tokenizer)
        started = time.thread_time()
        for _ in range(tokens):
            detokenizer.push([lead])
        return time.thread_time() - started

    few = min(seconds(2_000) for _ in range(3))
    assert seconds(40_000) < 5 * 20 * few, "twenty times the tokens must not cost a hundred times as much"


LETTERS = st.text("ab😀", max_size=12)


@given(text=LETTERS, stops=st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=4))
def test_only_what_may_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    told, stopped = stream.push(text)
    held = text[len(told) :]
    if not stopped and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)
