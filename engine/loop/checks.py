"""Checks of a message against the limits of the model that serves it. What holds for every model was checked when the message was
decoded (:mod:`engine.wire`). No torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from yardstick_llm.engine import wire


def all_known(branches: Collection[Sequence[int]], info: wire.Info) -> bool:
    """Whether every token id of ``branches`` is one of the model's: :func:`known` of each, in half of the time."""
    try:
        ids = np.fromiter(itertools.chain.from_iterable(branches), np.int64, sum(map(len, branches)))
    except OverflowError:
        return False
    return not ids.size or bool(ids.min() >= 0 and ids.max() < info.vocab_size)


def known(tokens: Collection[int], info: wire.Info) -> bool:
    """Whether every token id is one of the model's."""
    return not tokens or (min(tokens) >= 0 and max(tokens) < info.vocab_size)


MAX_NUMBERS = 1 << 18
"""Most numbers in the answer to a :class:`engine.wire.Score` of several branches: 8 times as many as a gateway asks for in one
message, and twice as many as a message of the gateway has tokens, each of which may have a log-probability. The row of a single
branch is bounded by the context."""
MAX_REPEATED_TOKENS = 1 << 22
"""Most tokens of the prefix times branches, where each branch has a copy of the prefix: of means, and in an encoder."""


def score_problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``message``, as sentences."""
    yield from readout_problems(message.readout, info)
    yield from _branch_problems(message, info)
    yield from _answer_problems(message, info)


def readout_problems(readout: wire.ScoreReadout, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``readout``, as sentences."""
    if isinstance(readout, wire.Labels):
        if len(readout.tokens) > info.limits.max_labels:
            yield f"{len(readout.tokens)} labels, at most {info.limits.max_labels} are allowed."
        if not known(readout.tokens, info):
            yield f"Label ids must be between 0 and {info.vocab_size - 1}."
    elif isinstance(readout, wire.Embedding):
        dimensions = readout.dimensions
        if dimensions is not None and dimensions > info.embedding_size:
            yield f"dimensions is {dimensions}; at most {info.embedding_size} is allowed."
        if readout.prompt_tokens and not info.encoder:
            yield "prompt_tokens needs a model whose tokens all attend to each other."


def _branch_problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    limits = info.limits
    if len(message.branches) > limits.max_branches:
        yield f"{len(message.branches)} branches, at most {limits.max_branches} are allowed."
    if not known(message.prefix, info):
        yield f"The prefix has a token id that is not between 0 and {info.vocab_size - 1}."
    most = min(info.max_context, limits.max_slots) - len(message.prefix)
    every_id_known = all_known(message.branches, info)
    for index, branch in enumerate(message.branches):
        if not branch:
            yield f"Branch {index} is empty."
        if not (every_id_known or known(branch, info)):
            yield f"Branch {index} has a token id that is not between 0 and {info.vocab_size - 1}."
        if len(branch) > most:
            yield f"Branch {index} makes a prompt of {len(message.prefix) + len(branch)} tokens; {most + len(message.prefix)} fit."


def _answer_problems(message: wire.Score, info: wire.Info) -> Iterator[str]:
    if isinstance(message.readout, wire.Likelihood) and message.branches and not message.prefix:
        yield "The prefix is empty; the likelihood of a branch needs at least one token before it."
    expansion = message.readout.expansion_tokens if isinstance(message.readout, wire.TokenVectors) else 0
    if expansion and expansion >= min(map(len, message.branches), default=0):
        yield f"expansion_tokens is {expansion}, and a branch has no more tokens."
    repeated = len(message.prefix) * len(message.branches)
    if (info.encoder or isinstance(message.readout, wire.Embedding)) and repeated > MAX_REPEATED_TOKENS:
        yield f"A prefix of {len(message.prefix)} tokens for {len(message.branches)} branches is too long; send fewer branches."
    numbers = sum(wire.row_length(message.readout, branch, info) for branch in message.branches)
    if numbers > MAX_NUMBERS and len(message.branches) > 1:
        yield f"The answer would have {numbers} numbers, at most {MAX_NUMBERS} are allowed; send fewer branches."


def item_problems(message: wire.ScoreItems, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``message``, as sentences."""
    yield from readout_problems(message.readout, info)
    if info.encoder:
        yield "This model computes prompts whole, so items cannot come before the query; send a Score."
        return
    if len(message.items) % 4 or len(message.lengths) % 4:
        yield "items and lengths must be 32-bit integers."
        return
    ids, lengths = np.frombuffer(message.items, "<i4"), np.frombuffer(message.lengths, "<i4")
    if len(lengths) > info.limits.max_branches:
        yield f"{len(lengths)} items, at most {info.limits.max_branches} are allowed."
    if (lengths < 0).any() or int(lengths.sum(dtype=np.int64)) != len(ids):
        yield "lengths must be those of the items."
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
        yield f"An item has a token id that is not between 0 and {info.vocab_size - 1}."
    if not known(message.query, info):
        yield f"The query must be token ids between 0 and {info.vocab_size - 1}."
    longest, most = int(lengths.max(initial=0)), min(info.max_context, info.limits.max_slots)
    if longest + len(message.query) > most:
        yield f"An item makes a prompt of {longest + len(message.query)} tokens; {most} fit."
    if isinstance(message.readout, wire.Likelihood) and not lengths.all():
        yield "An item is empty; the likelihood of the query needs at least one token before it."
    numbers = len(lengths) * wire.row_length(message.readout, message.query, info)
    if numbers > MAX_NUMBERS and len(lengths) > 1:
        yield f"The answer would have {numbers} numbers, at most {MAX_NUMBERS} are allowed; send fewer items."


DIGEST = 16
"""Bytes of a digest."""

Message = wire.Score | wire.ScoreItems | wire.Generate


def as_text(message: Message, vision: wire.VisionInfo) -> Message:
    """Return ``message`` with the token that marks a merged patch in place of the tokens of images."""

    def text(tokens: Sequence[int]) -> list[int]:
        return [vision.image_token if token >= wire.IMAGE_TOKENS else token for token in tokens]

    if isinstance(message, wire.Generate):
        return msgspec.structs.replace(message, prompt=text(message.prompt))
    if isinstance(message, wire.Score):
        return msgspec.structs.replace(message, prefix=text(message.prefix), branches=[text(each) for each in message.branches])
    if len(message.items) % 4:
        return message
    ids = np.frombuffer(message.items, "<i4")
    items = np.where(ids >= wire.IMAGE_TOKENS, np.int32(vision.image_token), ids).astype("<i4").tobytes()
    return msgspec.structs.replace(message, items=items, query=text(message.query))


def image_problems(message: Message, vision: wire.VisionInfo) -> Iterator[str]:
    """Yield the problems with the images of ``message``. Digests were compared with pixels before
    (:mod:`engine.server.loop_process`)."""
    images = message.images
    if len(images) > vision.max_images:
        yield f"{len(images)} images, at most {vision.max_images} are allowed."
    for place, image in enumerate(images):
        yield from _size_problems(place, image, vision)
    total = sum(vision.tokens_of(image) for image in images)
    if total > vision.max_tokens:
        yield f"The images have {total} tokens together, at most {vision.max_tokens} are allowed; send fewer or smaller images."
    for name, tokens in _prompts(message):
        yield from _prompt_problems(name, tokens, images, vision)


def _size_problems(place: int, image: wire.Image, vision: wire.VisionInfo) -> Iterator[str]:
    merge, numbers = vision.merge_size, 3 * vision.patch_size**2
    for name, count in (("rows", image.rows), ("columns", image.columns)):
        if count < merge or count % merge:
            yield f"Image {place} has {count} {name} of patches; a multiple of {merge} is needed."
    patches = image.rows * image.columns
    if patches * vision.patch_size**2 > vision.max_pixels:
        yield f"Image {place} has {patches * vision.patch_size**2} pixels, at most {vision.max_pixels} are allowed."
    if len(image.pixels) != patches * numbers:
        size = f"{image.rows} by {image.columns} patches have {patches * numbers}"
        yield f"Image {place} has {len(image.pixels)} bytes of pixels; {size}."
    if len(image.digest) != DIGEST:
        yield f"The digest of image {place} has {len(image.digest)} bytes; {DIGEST} are needed."


def _prompts(message: Message) -> Iterable[tuple[str, npt.NDArray[np.int64]]]:
    """Parts of prompts, each of which shows whole images, and their names."""
    if isinstance(message, wire.Generate):
        yield "The prompt", _ids(message.prompt)
    elif isinstance(message, wire.Score):
        yield "The prefix", _ids(message.prefix)
        for place, branch in enumerate(message.branches):
            yield f"Branch {place}", _ids(branch)
    else:
        yield "The query", _ids(message.query)
        if len(message.items) % 4 == 0 and len(message.lengths) % 4 == 0:
            ends = np.cumsum(np.frombuffer(message.lengths, "<i4"))[:-1]
            for place, item in enumerate(np.split(np.frombuffer(message.items, "<i4").astype(np.int64), ends)):
                yield f"Item {place}", item


def _ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Ids beyond 32 bits are as wrong as the largest of these, and -1 as wrong as all below."""
    return np.fromiter((max(-1, min(token, 1 << 32)) for token in tokens), np.int64, len(tokens))


def _prompt_problems(
    name: str, tokens: npt.NDArray[np.int64], images: Sequence[wire.Image], vision: wire.VisionInfo
) -> Iterator[str]:
    shown = tokens >= wire.IMAGE_TOKENS
    if not shown.any():
        return
    if int(tokens.max()) >= wire.IMAGE_TOKENS + len(images):
        yield f"{name} shows image {int(tokens.max()) - wire.IMAGE_TOKENS}, and the message has {len(images)} images."
        return
    marked = np.where(shown, tokens, -1)
    begins = np.flatnonzero(np.diff(marked, prepend=-2))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(tokens)], strict=True):
        if not shown[begin]:
            continue
        place = int(tokens[begin]) - wire.IMAGE_TOKENS
        whole = vision.tokens_of(images[place])
        if (end - begin) % whole:
            yield f"{name} has {end - begin} tokens of image {place} on end; it has {whole}."


def generation_problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    """Yield the problems with ``message``, as sentences."""
    yield from _sampling_problems(message, info)
    yield from _constraint_problems(message, info)
    yield from guidance_problems(message, info)


def _sampling_problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    limits, sampling = info.limits, message.sampling
    if not known(message.prompt, info):
        yield f"The prompt must be token ids between 0 and {info.vocab_size - 1}."
    if not known(sampling.logit_bias, info) or not known(sampling.stop_token_ids, info):
        yield f"Token ids in logit_bias and stop_token_ids must be between 0 and {info.vocab_size - 1}."
    limit = message.thinking_limit
    if limit is not None and not known([limit.thinking.close, limit.thinking.open or 0], info):
        yield f"thinking_limit needs tags between 0 and {info.vocab_size - 1}."
    if sampling.n > limits.max_sequences:
        yield f"n is {sampling.n}; at most {limits.max_sequences} is allowed."
    if message.resume_offset >= len(message.prompt) or (message.resume_offset and sampling.n != 1):
        yield "resume_offset must be less than the prompt's length, and n must be 1 with it."
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(message, name)
        if count is not None and count > limits.max_logprobs:
            yield f"{name} is {count}; at most {limits.max_logprobs} is allowed."
    if message.index > limits.max_sequences - sampling.n:
        yield f"index is {message.index}; with n it may reach {limits.max_sequences}."
    total = len(message.prompt) + max(sampling.max_tokens - message.resume_offset, 0)
    if total > min(info.max_context, limits.max_slots):
        yield f"Prompt and max_tokens come to {total} tokens; {min(info.max_context, limits.max_slots)} fit."


def _constraint_problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    sampling = message.sampling
    allowed, banned = sampling.allowed_token_ids, list(itertools.chain(*sampling.bad_words))
    if len(message.grammar.encode()) > wire.MAX_GRAMMAR_BYTES:
        yield f"The grammar has more than {wire.MAX_GRAMMAR_BYTES} bytes."
    if message.grammar and sampling.ignore_eos:
        yield "ignore_eos contradicts a grammar, whose output ends where it is complete."
    if allowed is not None and not known(allowed, info):
        yield f"allowed_token_ids must be token ids between 0 and {info.vocab_size - 1}."
    if len(banned) > wire.MAX_BAD_TOKENS:
        yield f"bad_words have {len(banned)} tokens; at most {wire.MAX_BAD_TOKENS} are allowed."
    if not known(banned, info):
        yield f"bad_words must be token ids between 0 and {info.vocab_size - 1}."


def guidance_problems(message: wire.Generate, info: wire.Info) -> Iterator[str]:
    """Problems of the guidance of ``message``; each names its key."""
    guidance = message.length_guidance
    if guidance is None:
        return
    if guidance.top_k > info.limits.max_candidates:
        yield f"top_k of the guidance is {guidance.top_k}; at most {info.limits.max_candidates} is allowed."
    if guidance.applies_to != "both" and guidance.thinking is None:
        yield f"applies_to {guidance.applies_to} needs thinking."
    if message.sampling.temperature <= 0 and guidance.needs_draw:
        remedy = "constraint about, eq, ge, le or within, or a temperature above 0"
        yield f"At temperature 0 nothing is drawn: length_guidance needs {remedy}."
    if guidance.confidence is not None:
        levels = [] if info.lenvm_calibration is None else map(float, info.lenvm_calibration.log_ratio)
        if guidance.constraint != "within" or guidance.target_length is None or guidance.gamma is not None:
            yield "confidence needs constraint within and target_length, and no gamma."
        elif guidance.confidence > max(levels, default=0.0):
            yield f"confidence {guidance.confidence} is above the levels of the length model's calibration."
    if guidance.unit != "tokens":
        if guidance.target_length is None or guidance.target_length_mode != "total" or guidance.applies_to != "both":
            yield f"unit {guidance.unit} needs a target_length of the whole output."
        elif "grammar" not in info.capabilities:
            yield f"unit {guidance.unit} needs the spelling of tokens, which this model's tokeniser does not give."
    if guidance.return_values and message.logprobs is None:
        yield "return_values needs logprobs."
    targets = (guidance.target_length is not None) + (guidance.target_value is not None)
    if guidance.constraint is not None and targets != 1:
        yield f"constraint {guidance.constraint} needs target_length or target_value, and not both."
    if guidance.constraint == "about" and (guidance.target_length is None or guidance.target_length_mode != "total"):
        yield "constraint about needs target_length, and target_length_mode total."
    if guidance.constraint is None and targets:
        yield "target_length and target_value need a constraint, such as eq."


MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
"""Range of :attr:`engine.wire.Caller.weight`."""
MAX_CALLER_CHARACTERS = 512
"""Longest string in :class:`engine.wire.Caller`."""
NEEDED: dict[type[wire.ScoreReadout], str] = {
    wire.Labels: "score",
    wire.Likelihood: "score",
    wire.Classes: "classify",
    wire.Embedding: "embed",
    wire.TokenVectors: "token_vectors",
    wire.Sparse: "sparse",
    wire.LengthValue: "length_guidance",
}
"""Capability that each readout needs."""


WORDS = {"token_vectors": "make token vectors", "sparse": "make sparse weights"}
"""Capabilities in words, where they are no verbs."""


def check(message: Message, info: wire.Info) -> str | None:
    """Return the problem with ``message`` for a model like ``info``, as a sentence for the caller; None if there is none."""
    problem = _caller_problem(message.caller)
    if problem is not None:
        return problem
    lacking = _lacking(message, info)
    if lacking == "grammar":
        return "The output of this model cannot follow a grammar."
    if lacking == "length_guidance":
        return "This engine has no length model."
    if lacking is not None:
        able = [name for name in info.capabilities if name not in {"length_guidance", "grammar", "vision"}]
        return f"This model cannot {WORDS.get(lacking, lacking)}; it can {' and '.join(WORDS.get(name, name) for name in able)}."
    if message.images:
        if info.vision is None:
            return "This model reads no images."
        if (problem := next(image_problems(message, info.vision), None)) is not None:
            return problem
        message = as_text(message, info.vision)
    if isinstance(message, wire.Generate):
        return next(generation_problems(message, info), None)
    if isinstance(message, wire.ScoreItems):
        return next(item_problems(message, info), None)
    return next(score_problems(message, info), None)


def _lacking(message: Message, info: wire.Info) -> str | None:
    """Return the first capability that ``message`` needs and the model lacks."""
    if isinstance(message, wire.Score | wire.ScoreItems):
        needed = [NEEDED[type(message.readout)]]
    else:
        needed = ["generate"]
        needed += ["length_guidance"] if message.length_guidance is not None else []
        needed += ["grammar"] if message.grammar else []
    return next((name for name in needed if name not in info.capabilities), None)


def _caller_problem(caller: wire.Caller) -> str | None:
    if not MIN_WEIGHT <= caller.weight <= MAX_WEIGHT:  # not a number is neither
        return f"weight is {caller.weight}; between {MIN_WEIGHT:g} and {MAX_WEIGHT:g} is allowed."
    for name in ("request_id", "tenant", "cache_salt"):
        length = len(getattr(caller, name))
        if length > MAX_CALLER_CHARACTERS:
            return f"{name} has {length} characters; at most {MAX_CALLER_CHARACTERS} are allowed."
    return None
