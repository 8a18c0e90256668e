"""Tokens to bytes and back, against the library's own decoding."""

import json
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from tests.gateway.text.conftest import bytes_of
from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.text.tokenizer import Tokenizer, TokenizerError

TEXT = st.text(st.one_of(st.sampled_from("ab re w😀é東 \n▁Ġ"), st.characters(codec="utf-8")), max_size=40)


def from_library(library: Library) -> Tokenizer:
    return Tokenizer.from_files(TokenizerFiles(library.to_str().encode(), None, {}))


@given(text=TEXT.filter(lambda text: "▁" not in text and not text.startswith(" ")))
def test_decoding_is_the_librarys_where_the_bytes_are_text(library: Library, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for skip in (True, False):
        expected = library.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(text=TEXT.filter(lambda text: "▁" not in text and not text.startswith(" ")))
def test_decoding_undoes_encoding(tokenizer: Tokenizer, text: str) -> None:
    normal = text if tokenizer.strips_leading_space else unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text, parse_special_tokens=False)) == normal


def test_an_added_token_is_text_even_where_its_characters_could_stand_for_bytes(byte_library: Library) -> None:
    library = Library.from_str(byte_library.to_str())
    library.add_tokens(["Ġé"])
    tokenizer = from_library(library)
    assert tokenizer.token_text(library.token_to_id("Ġé")) == "Ġé"
    assert tokenizer.decode(tokenizer.encode("red Ġé!")) == "red Ġé!"


def test_byte_tokens_are_bytes_only_where_the_tokeniser_falls_back_to_them() -> None:
    library = Library(models.BPE(vocab={"<0xE2>": 0, "▁a": 1}, merges=[]))
    library.decoder = decoders.Metaspace(prepend_scheme="never")
    assert bytes_of(from_library(library), 0) == b"<0xE2>"
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    assert bytes_of(from_library(library), 0) == b"\xe2"
    assert from_library(library).decode([1]) == " a"


def test_the_vocabulary_counts_added_tokens_and_no_padding(byte_library: Library, byte_tokenizer: Tokenizer) -> None:
    tokenizer = byte_tokenizer
    assert tokenizer.vocab_size == byte_library.get_vocab_size(with_added_tokens=True)
    assert tokenizer.has_token(tokenizer.vocab_size - 1)
    for id in (tokenizer.vocab_size, -1, 2**31, 2**70):
        assert not tokenizer.has_token(id)
        assert bytes_of(tokenizer, id) == b""
        assert tokenizer.token_text(id) == ""


def test_a_hole_in_the_vocabulary_is_no_token() -> None:
    library = Library(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    library.decoder = decoders.ByteLevel()
    tokenizer = from_library(library)
    assert tokenizer.vocab_size == 8
    assert [id for id in range(9) if tokenizer.has_token(id)] == [0, 7]


def test_an_id_that_lies_about_the_size_of_the_vocabulary_is_refused(byte_library: Library) -> None:
    """A table of all ids would take gigabytes and minutes, in the process of all models' text workers."""
    document = json.loads(byte_library.to_str())
    document["model"]["vocab"]["new"] = 1 << 31
    with pytest.raises(TokenizerError, match="ids up to 2147483648; at most 262144 may be without one"):
        Tokenizer.from_files(TokenizerFiles(json.dumps(document).encode(), None, {}))


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b"[]"])
def test_a_broken_file_is_a_typed_error(content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_files(TokenizerFiles(content, None, {}))


def test_an_empty_or_unknown_kind_of_tokeniser_is_refused(byte_library: Library) -> None:
    with pytest.raises(TokenizerError, match="no tokens"):
        from_library(Library(models.BPE()))
    document = json.loads(byte_library.to_str())
    document["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    with pytest.raises(TokenizerError, match="BPEDecoder"):
        Tokenizer.from_files(TokenizerFiles(json.dumps(document).encode(), None, {}))


@given(text=st.text(max_size=60) | st.text("🦊é a", max_size=60), most=st.integers(0, 12), left=st.booleans())
def test_texts_are_cut_to_tokens_and_not_inside_characters(byte_tokenizer: Tokenizer, text: str, most: int, left: bool) -> None:
    cut, was_cut = byte_tokenizer.shorten(text, most, left=left)
    whole = len(byte_tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False))
    assert was_cut == (whole > most)
    assert text.endswith(cut) if left else text.startswith(cut)
    assert cut == text or len(cut) < len(text)


@given(text=st.text(max_size=60) | st.text("🦊é a", max_size=60) | st.text("shoe redwn ", max_size=60), most=st.integers(0, 12))
def test_the_middle_is_cut(byte_tokenizer: Tokenizer, text: str, most: int) -> None:
    cut, was_cut = byte_tokenizer.cut_middle(text, most)
    count = lambda text: len(byte_tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False))  # noqa: E731
    assert was_cut == (count(text) > most)
    assert count(cut) <= max(most, 0 if was_cut else count(text))
    assert any(text.startswith(cut[:place]) and text.endswith(cut[place:]) for place in range(len(cut) + 1))
    assert cut == text or len(cut) < len(text)


def test_both_ends_of_a_text_keep_half_of_the_tokens(byte_tokenizer: Tokenizer) -> None:
    text = "".join(f" {number}" for number in range(1000))
    cut, was_cut = byte_tokenizer.cut_middle(text, 100)
    assert was_cut
    assert 90 < len(byte_tokenizer.encode(cut, add_special_tokens=False)) <= 100
    place = next(place for place in range(len(cut)) if not text.startswith(cut[: place + 1]))
    assert [40 < len(byte_tokenizer.encode(part, add_special_tokens=False)) < 60 for part in (cut[:place], cut[place:])] == [
        True
    ] * 2


def test_cutting_does_not_tokenise_the_whole_text(byte_tokenizer: Tokenizer) -> None:
    began = time.process_time()
    assert 50 < len(byte_tokenizer.cut_middle("the fox " * 4_000_000, 100)[0]) < 5000
    for left in (False, True):
        cut, was_cut = byte_tokenizer.shorten("the fox " * 4_000_000, 100, left=left)
        assert was_cut
        assert 50 < len(cut) < 5000
    assert time.process_time() - began < 1
