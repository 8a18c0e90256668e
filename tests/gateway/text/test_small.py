"""Short texts get on the event loop exactly the ids that workers give them, or are left to workers."""

from __future__ import annotations

import json
import random
import re
import time
import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from engine.wire import TokenizerFiles
from gateway.text import merges as merges_module
from gateway.text import small as module
from gateway.text.alternatives import MOST_NESTED, any_of
from gateway.text.bounds import NeedsWorker
from gateway.text.merges import Merges, merge_table
from gateway.text.prompts import tokenise_pairs
from gateway.text.small import SmallTokenizer
from gateway.text.special import Marked
from gateway.text.spelling import TokenizerError
from gateway.text.tokenizer import Tokenizer
from tests.gateway.text.conftest import CORPUS, CUTTABLE, byte_level, from_library, sentencepiece
from tests.gateway.text.test_cuts import TEXT
from tests.gateway.text.test_pieces import BY_PIECES, PROSE, SAID


def small_of(library: Library) -> SmallTokenizer:
    tokenizer = from_library(library)
    assert tokenizer.table.small is not None
    return SmallTokenizer(tokenizer.table, tokenizer.table.small)


@cache
def pair(name: str) -> tuple[Tokenizer, SmallTokenizer]:
    """A tokeniser of workers, and the one of the event loop."""
    return from_library(CUTTABLE[name]()), small_of(CUTTABLE[name]())


def or_worker(small: SmallTokenizer, encode: Callable[[], list[int]]) -> list[int] | None:
    small.begin()
    try:
        return encode()
    except NeedsWorker:
        return None


@settings(max_examples=2 * settings().max_examples)
@given(name=st.sampled_from(BY_PIECES), text=TEXT, special=st.booleans(), parsed=st.booleans())
def test_ids_are_those_of_workers(name: str, text: str, special: bool, parsed: bool) -> None:
    tokenizer, small = pair(name)
    options = {"add_special_tokens": special, "parse_special_tokens": parsed}
    found = or_worker(small, lambda: small.encode(text, **options))
    assert found in (None, tokenizer.encode(text, **options))


@settings(max_examples=2 * settings().max_examples)
@given(name=st.sampled_from(BY_PIECES), text=TEXT, most=st.integers(0, 20), left=st.booleans())
def test_a_text_that_is_not_cut_is_found_so(name: str, text: str, most: int, left: bool) -> None:
    tokenizer, small = pair(name)
    small.begin()
    try:
        found = small.shorten(text, most, left=left)
    except NeedsWorker:
        return
    assert found == tokenizer.shorten(text, most, left=left) == (text, False)


@pytest.mark.parametrize("name", BY_PIECES)
def test_prose_is_read(name: str) -> None:
    tokenizer, small = pair(name)
    lines = [line for line in PROSE.splitlines() if line and "  " not in line]
    found = {line: or_worker(small, lambda line=line: small.encode(line)) for line in lines}
    read = {line: ids for line, ids in found.items() if ids is not None}
    assert len(read) > 0.8 * len(lines)
    assert read == {line: tokenizer.encode(line) for line in read}


@settings(max_examples=2 * settings().max_examples)
@given(parts=st.lists(st.sampled_from(SAID), max_size=9))
def test_conversations_have_the_templates_control_tokens(parts: list[str]) -> None:
    tokenizer, small = pair("qwen")
    text = "".join(parts)
    assert or_worker(small, lambda: small.encode_marked(Marked(text))) == tokenizer.encode_marked(Marked(text))


@settings(max_examples=2 * settings().max_examples)
@given(name=st.sampled_from(BY_PIECES), query=TEXT, items=st.lists(TEXT.filter(bool), min_size=1, max_size=3))
def test_prefix_and_branches_are_those_of_workers(name: str, query: str, items: list[str]) -> None:
    tokenizer, small = pair(name)
    small.begin()
    try:
        found = tokenise_pairs(small, query, items)
    except NeedsWorker:
        return
    assert found == tokenise_pairs(tokenizer, query, items)


@pytest.mark.parametrize(
    "call",
    [
        lambda small: small.encode("e\u0301"),
        lambda small: small.encode("a" * (module.MAX_PIECE_CHARACTERS + 1)),
        lambda small: small.encode(" ".join(f"wo{chr(97 + place)}{chr(97 + place)}denoodwoden" for place in range(26))),
        lambda small: small.encode("a " * module.MAX_CHARACTERS),
        lambda small: [small.encode("a") for _ in range(1000)],
        lambda small: small.encode_marked(Marked("a", "\U000f0000")),
        lambda small: small.shorten("a b c", 1),
        lambda small: small.shorten(" woodenness" * 20, 20),
        lambda small: small.check_room(2, module.MAX_CHARACTERS - 2 * module.TEXT_CHARACTERS + 1),
        lambda small: small.spelled([1]),
    ],
)
def test_other_texts_are_left_to_workers(call: Callable[[SmallTokenizer], object]) -> None:
    small = small_of(byte_level())
    with pytest.raises(NeedsWorker):
        call(small)
    small.begin()
    assert small.encode("a b") == from_library(byte_level()).encode("a b")


def test_a_text_with_many_new_words_is_read_when_they_are_known() -> None:
    small, text = small_of(byte_level()), " ".join(f"wo{chr(97 + place)}{chr(97 + place)}denoodwoden" for place in range(26))
    tried = [or_worker(small, lambda: small.encode(text)) for _ in range(4)]
    assert tried[0] is None
    assert tried[-1] == from_library(byte_level()).encode(text)


def test_tokenisers_of_another_kind_are_left_to_workers() -> None:
    for library in (sentencepiece(metaspace=True), CUTTABLE["digits"]()):
        assert from_library(library).table.small is None


def test_a_line_of_a_table_is_read() -> None:
    text = f"a table:\n+{'-' * 40}+{'-' * 50}+"
    assert small_of(byte_level()).encode(text) == from_library(byte_level()).encode(text)


@cache
def with_merges(whole: bool, shuffled: int) -> tuple[Library, Tokenizer, Merges]:
    """A tokeniser with tokens that no merges make. ``whole``: a piece that is a token is not divided. ``shuffled``: seed of another
    order of the merges; 0: theirs."""
    document = json.loads(byte_level().to_str())
    model = document["model"]
    model["ignore_merges"] = whole
    if shuffled:
        random.Random(shuffled).shuffle(model["merges"])
    last = max(model["vocab"].values())
    model["vocab"] |= {"zebra": last + 50, "redred": last + 51, "<think>": last + 52}
    library = Library.from_str(json.dumps(document))
    tokenizer = Tokenizer(library)
    return library, tokenizer, Merges(merge_table(document, tokenizer.token_bytes, tokenizer._by_library), tokenizer.token_bytes)


def check(library: Library, merges: Merges, piece: str) -> None:
    """Check the ids of a text that is one piece."""
    if len(library.pre_tokenizer.pre_tokenize_str(piece)) == 1:
        assert merges.encode(piece.encode()) == library.encode(piece, add_special_tokens=False).ids, piece


@pytest.mark.parametrize("shuffled", [0, 1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_merges_are_those_of_the_library(whole: bool, shuffled: int) -> None:
    library, tokenizer, merges = with_merges(whole, shuffled)
    drawn = random.Random(1)
    spelled = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    pieces = {piece for line in CORPUS for piece in re.findall(r" ?\w+", line)} | {"zebra", " zebra", "zebras", "é"}
    pieces |= {"".join(drawn.choices("woden rustabliq", k=drawn.randint(1, 12))) for _ in range(300)}
    added = set(tokenizer._added)
    pieces |= {spelling.decode("utf-8", "ignore") for spelling in spelled} - added
    for piece in sorted(pieces):
        check(library, merges, piece)
    assert (len(merges.encode(b"zebra")) == 1) == whole
    words = [id for id, spelling in enumerate(spelled) if spelling and merges._word(spelling) == id]
    assert 200 < len(words) <= len(spelled) - (0 if whole else 3)


@settings(max_examples=2 * settings().max_examples)
@given(whole=st.booleans(), shuffled=st.integers(0, 2), seed=st.integers(0, 1 << 30), tokens=st.integers(1, 4))
def test_merges_of_joined_tokens_are_those_of_the_library(whole: bool, shuffled: int, seed: int, tokens: int) -> None:
    library, tokenizer, merges = with_merges(whole, shuffled)
    drawn = random.Random(seed)
    for _ in range(20):
        ids = [drawn.randrange(tokenizer.vocab_size) for _ in range(tokens)]
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "ignore")
        piece = unicodedata.normalize("NFC", joined)  # as the library does first; the event loop reads no text that this changes
        if not any(token in piece for token in tokenizer._added):
            check(library, merges, piece)


def test_kept_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges_module, "MAX_PAIRS", 20)
    library, tokenizer, _ = with_merges(whole=False, shuffled=0)
    merges = Merges(tokenizer.table.small.merges, tokenizer.token_bytes)  # type: ignore[union-attr]
    for piece in (f" {left}{right}" for left in ("wood", "red", "shoe") for right in ("enness", "unning", "table", "lights")):
        check(library, merges, piece)
        assert len(merges._pairs) <= 20
    assert merges._pairs


@given(texts=st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=8), text=st.text("ab<|", max_size=30))
def test_one_expression_finds_the_longest_text(texts: list[str], text: str) -> None:
    longest_first = "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
    assert any_of(texts).findall(text) == re.findall(longest_first, text)


def test_added_tokens_that_begin_with_each_other_are_bounded() -> None:
    texts = ["a" * length for length in range(1, MOST_NESTED + 1)]
    assert any_of(texts).findall("a" * (2 * MOST_NESTED - 1)) == texts[:-3:-1]
    document = json.loads(byte_level().to_str())
    for id, length in enumerate(range(1, 1001), max(document["model"]["vocab"].values()) + 10):
        added = {"id": id, "content": "<|" + "a" * length, "special": True}
        document["added_tokens"].append(added | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    with pytest.raises(TokenizerError, match=f"more than {MOST_NESTED} added tokens begin with each other"):
        Tokenizer.from_files(TokenizerFiles(json.dumps(document).encode(), None, {}))


@pytest.mark.parametrize(
    "text", ["<|", "<|reserved_special_token_", "<", "a", " ", "\n ", "a\n", "'l", "1", "東", "<think>", " \t"]
)
def test_hostile_texts_take_little_time(text: str) -> None:
    """One of 1000 reserved tokens could begin at every place."""
    library = byte_level()
    library.add_tokens([AddedToken(f"<|reserved_special_token_{number}|>", normalized=False) for number in range(1000)])
    small = small_of(library)
    long = (text * module.MAX_CHARACTERS)[: module.MAX_CHARACTERS - module.TEXT_CHARACTERS]
    began = time.thread_time()
    small.controls.may_form(long)
    or_worker(small, lambda: small.encode(long))
    assert time.thread_time() - began < 0.1, "some 0.001 s on an idle machine"
