"""Data sets of answers: their texts, what is known of each state's remaining length, the discount, and batches.

The state after t output tokens has n tokens to come, the end token included. For an answer that ``max_tokens`` cut, n is a lower
bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import PlainAttend
from yardstick_llm.engine.models.files import ModelError, is_gguf
from yardstick_llm.engine.models.gguf.tokenizer import tokenizer_json
from yardstick_llm.engine.models.lenvm import LenVM

MANIFEST, ANSWERS = "manifest.json", "answers.jsonl"
SMALLEST = 1e-9
"""Values are clamped to this distance from 0 and 1 before they become lengths."""

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and an answer, without its end token."""

    prompt_id: str
    sample: int
    tokens: npt.NDArray[np.int32]
    """[prompt + answer]"""
    start: int
    """Tokens of the prompt, at least one."""
    ended: bool
    """Whether the model ended it; otherwise it was cut."""

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.start

    @property
    def remaining(self) -> Longs:
        """n of each state, [length + 1]; of a text that was cut, what it is at least."""
        return np.arange(self.length + 1, 0, -1)


def learned(text: Text, gamma: float, margin: float) -> npt.NDArray[np.bool_]:
    """Which states have a target, [length + 1]: those whose target 1 − γⁿ is off by at most ``margin`` if the text was cut."""
    return np.ones(text.length + 1, np.bool_) if text.ended else gamma**text.remaining <= margin


def read_tokens(text: Text, mask: npt.NDArray[np.bool_]) -> int:
    """Return how many of the text's tokens the states of ``mask`` need: up to the last such state, because attention is causal."""
    return text.start + int(np.flatnonzero(mask)[-1]) if mask.any() else 0


@dataclass(frozen=True)
class Dataset:
    """A folder of ``yardstick lenvm sample``."""

    manifest: dict[str, Any]
    digest: str
    """Of the answers."""
    splits: dict[str, list[Text]]
    """``train``, ``validation`` and ``test``, in the order of prompt and sample."""
    failed: int
    """Answers that are missing."""

    @property
    def cut_share(self) -> float:
        """Share of answers that were cut."""
        texts = [text for split in self.splits.values() for text in split]
        return sum(not text.ended for text in texts) / max(1, len(texts))

    def texts(self, split: str) -> list[Text]:
        """Return the texts of a split. Raises :class:`ModelError` if there are none."""
        if not self.splits[split]:
            raise ModelError(f"The data set has no answers in the split {split!r}; sample more prompts.")
        return self.splits[split]


class _Line(msgspec.Struct):
    prompt_id: str
    sample: int
    split: str
    error: str | None
    prompt_ids: list[int] = []
    output_ids: list[int] = []
    finish_reason: str | None = None


def read_dataset(directory: Path, config: ModelConfig) -> Dataset:
    """Read a data set for a model of ``config``. A part of a line at the end, which a killed run leaves, is not read.

    Raises :class:`ModelError` for damaged lines, and for texts that the model cannot read.
    """
    manifest = _read_manifest(directory / MANIFEST)
    ends = {*config.eos_token_ids, *manifest.get("end_tokens", [])}
    texts: dict[str, dict[tuple[str, int], Text]] = {"train": {}, "validation": {}, "test": {}}
    failed: set[tuple[str, int]] = set()
    digest = hashlib.sha256()
    try:
        with (directory / ANSWERS).open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    break
                digest.update(line)
                try:
                    found = msgspec.json.decode(line, type=_Line)
                    if found.error is not None:
                        failed.add((found.prompt_id, found.sample))
                        continue
                    text = _text(found, ends, config)
                    texts[found.split][found.prompt_id, found.sample] = text
                except (ValueError, KeyError) as error:
                    raise ModelError(
                        f"{ANSWERS}, line {number}: {error}; remove the line, and repeat `yardstick lenvm sample`."
                    ) from None
    except OSError as error:
        raise ModelError(f"{ANSWERS} cannot be read ({error.strerror}); make it with `yardstick lenvm sample`.") from None
    failed -= {key for split in texts.values() for key in split}
    splits = {name: [split[key] for key in sorted(split)] for name, split in texts.items()}
    return Dataset(manifest, digest.hexdigest()[:32], splits, len(failed))


def _text(line: _Line, ends: set[int], config: ModelConfig) -> Text:
    """Raises ValueError for a line that is no answer, and :class:`ModelError` for one that is not for this model."""
    if line.finish_reason not in ("stop", "length") or not line.prompt_ids:
        raise ValueError("not an answer with a prompt and a finish_reason")
    ended, output = line.finish_reason == "stop", line.output_ids
    output = output[:-1] if ended and output and output[-1] in ends else output
    ids = line.prompt_ids + output
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        raise ModelError(
            f"An answer has the token {max(ids)}, and the model {config.vocab_size} tokens; give a model of the same tokeniser."
        )
    if len(ids) > config.max_context:
        raise ModelError(
            f"An answer has {len(ids)} tokens with its prompt, and the model reads {config.max_context}; give another model."
        )
    return Text(line.prompt_id, line.sample, np.array(ids, np.int32), len(line.prompt_ids), ended)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read ({error}); --data is a folder of `yardstick lenvm sample`.") from None


def check_tokenizer(manifest: dict[str, Any], directory: Path) -> None:
    """Raise :class:`ModelError` unless the tokeniser in ``directory`` gives the ids that the sampled model's server gave."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not is_gguf(directory) and not path.is_file():
        raise ModelError(f"{directory.name} has no tokenizer.json, which shows whether its tokens are those of the data.")
    tokenizer = Tokenizer.from_buffer(tokenizer_json(directory) if is_gguf(directory) else path.read_bytes())
    for probe in manifest.get("tokenizer", []):
        ids = tokenizer.encode(probe["text"], add_special_tokens=False).ids
        if ids != probe["ids"]:
            raise ModelError(
                f"{directory.name} has another tokeniser than the model {manifest.get('model')!r} of the data set; give a model of "
                "the same family."
            )


def length_quantile(lengths: Sequence[int], ended: Sequence[bool], share: float) -> int:
    """Return the length that ``share`` of all texts do not exceed, by the product-limit estimate, which counts texts that were cut
    as long as they are known; the longest if the share is not reached.

    Source: Kaplan and Meier 1958, "Nonparametric Estimation from Incomplete Observations".
    """
    order = np.argsort(lengths, kind="stable")
    times, ends = np.asarray(lengths)[order], np.asarray(ended, np.bool_)[order]
    longer = 1.0
    for value in np.unique(times):
        here = times == value
        longer *= 1 - (here & ends).sum() / (times >= value).sum()
        if longer <= 1 - share + 1e-12:
            return int(value)
    return int(times[-1])


def gamma_for(length: int) -> float:
    """Return γ of 1 − γ^length = 0.99."""
    return float(0.01 ** (1 / length))


def to_lengths(values: Floats, gamma: float) -> Floats:
    """Return the n of values 1 − γⁿ."""
    return np.asarray(np.log1p(-np.clip(values, SMALLEST, 1 - SMALLEST)) / math.log(gamma))


class Batch(NamedTuple):
    """Whole texts, one after the other, each attending to itself only."""

    tokens: Tensor
    """[tokens] int64, like positions"""
    positions: Tensor
    rows: Tensor
    """[states] int64: the last token of each state"""
    lengths: list[int]
    """Tokens of each text."""


def pack(texts: Sequence[Text], masks: Sequence[npt.NDArray[np.bool_]], device: torch.device) -> Batch:
    """Pack texts up to the last state of ``masks``, [length + 1] each with one state at least."""
    lengths = [read_tokens(text, mask) for text, mask in zip(texts, masks, strict=True)]
    begins = np.cumsum([0, *lengths])
    rows = [begin + text.start - 1 + np.flatnonzero(mask) for begin, text, mask in zip(begins, texts, masks, strict=False)]
    tokens = np.concatenate([text.tokens[:length] for text, length in zip(texts, lengths, strict=True)])
    arrays = (tokens.astype(np.int64), np.concatenate([np.arange(length) for length in lengths]), np.concatenate(rows))
    on_device = [torch.from_numpy(array).to(device) for array in arrays]
    return Batch(on_device[0], on_device[1], on_device[2], lengths)


def attend_within(lengths: list[int]) -> PlainAttend:
    """Return causal attention within each of some texts of these lengths, one after the other; differentiable."""

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(torch.split(x.transpose(0, 1).unsqueeze(0), lengths, 2) for x in (q, k, v)), strict=True)
        outs = [scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    return attend


def raw_values(model: LenVM, batch: Batch) -> Tensor:
    """Return z of each state, [states] float32."""
    hidden = model(batch.tokens, batch.positions, attend_within(batch.lengths), batch.rows)
    return model.value(hidden)[0]


def passes(order: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Divide ``order`` into runs of at most ``most`` tokens, at least one text each. sizes: tokens of each text."""
    run: list[int] = []
    tokens = 0
    for index in order:
        if run and tokens + sizes[index] > most:
            yield run
            run, tokens = [], 0
        run.append(index)
        tokens += sizes[index]
    if run:
        yield run


@torch.inference_mode()
def predict(
    model: LenVM,
    texts: Sequence[Text],
    most: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda _: None,
    masks: Sequence[npt.NDArray[np.bool_]] = (),
) -> list[Floats]:
    """Return the value of every state of each text, [length + 1] each, or of those of ``masks``. most: tokens of a pass."""
    masks = masks or [np.ones(text.length + 1, np.bool_) for text in texts]
    found: list[Floats] = []
    for run in passes(range(len(texts)), [*map(read_tokens, texts, masks)], most):
        some = [masks[index] for index in run]
        z = raw_values(model, pack([texts[index] for index in run], some, device))
        found += [part.numpy() for part in torch.split(z.double().sigmoid().cpu(), [int(mask.sum()) for mask in some])]
        progress(len(found))
    return found
