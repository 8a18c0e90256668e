"""Tiny tokenisers of the families that real models use, trained here."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.text.tokenizer import Tokenizer

CORPUS = [
    "Query: red running shoes\nItem: wooden table, 42 legs\nRelevant: Yes",
    "The woodenness of wood is wooden; the reddest red is redder than red.",
    "naïve café façade, Straße, 東京都 の天気, привет мир, 😀 👩‍👩‍👧 🏳️‍🌈",
    "    indented()\n\n\n\treturn [x for x in range(100)]",
] * 3
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SPACE = "▁"


def byte_level() -> tokenizers.Tokenizer:
    """Qwen's kind."""
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    )
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<｜tool▁call｜>", normalized=False)])
    return library


def byte_level_with_bos() -> tokenizers.Tokenizer:
    """Llama 3's kind."""
    library = byte_level()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K_SPLIT = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)


def split_by(expression: str) -> tokenizers.Tokenizer:
    """A byte-level tokeniser with another expression, no normaliser, and added tokens with spaces, as in Phi."""
    library = byte_level()
    split = pre_tokenizers.Split(tokenizers.Regex(expression), behavior="isolated")
    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.add_tokens([AddedToken(text, normalized=True) for text in ("  ", "   ", "    ", "d re")])
    return library


def gpt2() -> tokenizers.Tokenizer:
    """GPT-2's kind, and the demo model's."""
    library = byte_level()
    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library


def digits() -> tokenizers.Tokenizer:
    """StarCoder's kind, with control tokens that take the whitespace beside them, as Phi-4's do."""
    library = gpt2()
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), library.pre_tokenizer])
    library.add_special_tokens([AddedToken("<|tail|>", rstrip=True), AddedToken("<|both|>", lstrip=True, rstrip=True)])
    return library


CUTTABLE = {
    "gpt2": gpt2,
    "gpt2-split": lambda: split_by(GPT2_SPLIT),
    "llama3": lambda: split_by(LLAMA3_SPLIT),
    "o200k": lambda: split_by(O200K_SPLIT),
    "digits": digits,
    "qwen-bos": byte_level_with_bos,
}
"""Tokenisers of the structures for which safe cuts are known."""


def wordpiece(*, lowercase: bool = True) -> tokenizers.Tokenizer:
    """BERT's kind."""
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    library.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return library


def unigram() -> tokenizers.Tokenizer:
    """XLM-RoBERTa's kind. Its normaliser is a table that does what NFKC does to most characters."""
    library = tokenizers.Tokenizer(models.Unigram())
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    library.decoder = decoders.Metaspace()
    library.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=200, special_tokens=["<s>", "<unk>"], unk_token="<unk>", show_progress=False)
    )
    library.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=True)])
    return library


BY_WORDS = {"bert": wordpiece, "bert-cased": lambda: wordpiece(lowercase=False), "xlm-roberta": unigram}
"""Tokenisers that drop whitespace between words."""


def sentencepiece(*, metaspace: bool) -> tokenizers.Tokenizer:
    """Llama 2's kind: a space before the first word, bytes for unknown characters, ``metaspace`` in its newer spelling."""
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)])
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        library.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    words = [word for line in CORPUS for word in line.split(" ")]
    plain = [word for word in words if word.isascii()]
    library.train_from_iterator(
        plain,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<unk>", *SPECIAL, *bytes_], initial_alphabet=[SPACE], show_progress=False
        ),
    )
    return without_special_bytes(library, bytes_)


def without_special_bytes(library: tokenizers.Tokenizer, bytes_: list[str]) -> tokenizers.Tokenizer:
    """Byte tokens are ordinary tokens in real files; the trainer can only add them as special ones."""
    document = json.loads(library.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in bytes_]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def sentencepiece_with_bos() -> tokenizers.Tokenizer:
    """As Llama 2 ships it."""
    library = sentencepiece(metaspace=False)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))])
    return library


FAMILIES = {
    "byte-level-bos": byte_level_with_bos,
    "sentencepiece-bos": sentencepiece_with_bos,
    "metaspace": lambda: sentencepiece(metaspace=True),
}


@pytest.fixture(scope="session", params=FAMILIES)
def library(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return FAMILIES[request.param]()


@pytest.fixture(scope="session")
def byte_library() -> tokenizers.Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def space_library() -> tokenizers.Tokenizer:
    return sentencepiece_with_bos()


@pytest.fixture(scope="session")
def tokenizer(library: tokenizers.Tokenizer) -> Tokenizer:
    return from_library(library)


@pytest.fixture(scope="session")
def byte_tokenizer(byte_library: tokenizers.Tokenizer) -> Tokenizer:
    return from_library(byte_library)


@pytest.fixture(scope="session")
def space_tokenizer(space_library: tokenizers.Tokenizer) -> Tokenizer:
    return from_library(space_library)


def from_library(library: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer.from_files(TokenizerFiles(library.to_str().encode(), None, {}))


def bytes_of(tokenizer: Tokenizer, id: int) -> bytes:
    return tokenizer.spellings(skip_special_tokens=False)[id]
