"""Readouts of scores: rows of :class:`engine.wire.Scored`, one class for each kind in :data:`engine.wire.ScoreReadout`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.models.encoder import Encoder, id_weight_pairs
from yardstick_llm.engine.models.modules import TokenHead, pooled
from yardstick_llm.engine.models.pooling import Pooling
from yardstick_llm.engine.models.transfer import Copy, Download, Upload
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import Branch, PartialRow, RawLabels, ScoringRequest
from yardstick_llm.engine.runner.readouts.base import Readout, ReadoutContext, StepResult, StepTensors
from yardstick_llm.kernels.label_logprobs import label_logprobs
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.row_chunks import CHUNK_ELEMENTS, row_chunks
from yardstick_llm.kernels.soft_cap import soft_cap


class LabelReadout(Readout):
    """Log-probabilities over the full vocabulary. Logits of other tokens are never stored."""

    kind: ClassVar[type[wire.Labels]] = wire.Labels
    numbers: Copy
    """[rows, largest number of labels]"""

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._labels: list[list[int]] = []

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request = segment.request
        assert isinstance(request, ScoringRequest)
        assert isinstance(request.readout, wire.Labels)
        if segment.completes:
            self.branches.append(branch)
            self.hidden_rows.append(row + segment.tokens.size - 1)
            self._labels.append(request.readout.tokens)

    def upload(self, upload: Upload) -> None:
        self._label_copy = upload.add(label_table(self._labels))

    def queue(self, step: StepTensors, download: Download) -> None:
        labels = self._label_copy.tensor.view(len(self._labels), -1)
        hidden = step.hidden[self]

        def logprobs(head: TokenHead, rows: slice) -> Tensor:
            return label_logprobs(head.input(hidden[rows]), head.operand, labels[rows], head.cap)

        self.numbers = download.add(self.context.by_head(self.branches, logprobs))

    def read(self, result: StepResult) -> None:
        rows = zip(self.branches, self.numbers.tensor.tolist(), self._labels, strict=True)
        result.rows += [(branch, row[: len(labels)]) for branch, row, labels in rows]


def label_table(labels: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """[rows, largest number of labels]; short rows are padded with token 0."""
    if len(set(map(len, labels))) == 1:
        return np.array(labels, np.int64)
    table = np.zeros((len(labels), max(map(len, labels), default=0)), np.int64)
    for row, ids in enumerate(labels):
        table[row, : len(ids)] = ids
    return table


class LabelLogitsReadout(LabelReadout):
    """Logits of the labels alone, for :attr:`engine.wire.Labels.raw`. Logits of other tokens are never computed."""

    kind = RawLabels

    def upload(self, upload: Upload) -> None:
        table = label_table(self._labels)
        distinct, columns = np.unique(table, return_inverse=True)
        self._token_copy = upload.add(distinct)
        self._column_copy = upload.add(columns)

    def queue(self, step: StepTensors, download: Download) -> None:
        columns = self._column_copy.tensor.view(len(self._labels), -1)
        hidden, tokens = step.hidden[self], self._token_copy.tensor

        def logits(head: TokenHead, rows: slice) -> Tensor:
            return soft_cap(label_logits(head.input(hidden[rows]), head.weight, tokens, columns[rows]), head.cap)

        self.numbers = download.add(self.context.by_head(self.branches, logits))


def label_logits(hidden: Tensor, head: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
    """``hidden · headᵀ`` at each row's own labels, in float32.

    hidden: [rows, size]; head: [vocab, size]; tokens: [tokens] int64, the labels of all rows, each once; columns: [rows, labels]
    int64, places in ``tokens``. -> [rows, labels]. Rows and tokens are taken a chunk at a time.
    """
    size = hidden.shape[1]
    width = max(len(tokens), size)
    parts = []
    for rows, places in zip(row_chunks(hidden, width), row_chunks(columns, width), strict=True):
        given = rows.float()
        logits = [linear(given, head.index_select(0, ids).float()) for ids in row_chunks(tokens, size)]
        parts.append(torch.cat(logits, 1).gather(1, places))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Targets:
    """One segment of a branch."""

    branch: Branch
    start: int
    """Place of the segment's first token in its branch."""
    targets: Ints
    """Tokens that the segment's rows predict."""
    completes: bool


class LikelihoodReadout(Readout):
    """:class:`engine.requests.core.ScoringRequest` says how branches and targets are made from the message.

    :attr:`~engine.requests.core.Branch.partial` has [tokens, 2]: log-probability, and 1 where the token is the most probable one.
    """

    kind = wire.Likelihood

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._parts: list[_Targets] = []

    @property
    def empty(self) -> bool:
        return not self._parts

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request, count = segment.request, len(segment.tokens)
        assert isinstance(request, ScoringRequest)
        targets = request.targets[branch.index][segment.start : segment.start + count]
        self._parts.append(_Targets(branch, segment.start, targets, segment.completes))
        self.hidden_rows += range(row, row + count)
        if segment.completes:
            self.branches.append(branch)

    def upload(self, upload: Upload) -> None:
        self._target_copy = upload.add(np.concatenate([part.targets for part in self._parts]))

    def queue(self, step: StepTensors, download: Download) -> None:
        hidden, targets = step.hidden[self], self._target_copy.tensor
        branches = [part.branch for part in self._parts for _ in part.targets]

        def likelihoods(head: TokenHead, rows: slice) -> Tensor:
            return token_likelihoods(head, hidden[rows], targets[rows])

        self._values = download.add(self.context.by_head(branches, likelihoods))

    def read(self, result: StepResult) -> None:
        lengths = [len(part.targets) for part in self._parts]
        for part, tensor in zip(self._parts, torch.split(self._values.tensor, lengths), strict=True):
            earlier, values = part.branch.partial_before(part.start), tensor.numpy()
            values = np.concatenate([*([] if earlier is None else [earlier]), values])
            part.branch.partial = PartialRow(len(values), values)
            if part.completes:
                result.rows.append((part.branch, [*values[:, 0].tolist(), float(values[:, 1].all())]))


def token_likelihoods(head: TokenHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target after its row of ``hidden``, and 1 where no token is more probable, otherwise 0.

    hidden: [rows, hidden]; targets: [rows] int64. -> [rows, 2] float32. Logits exist for a bounded number of rows at a
    time.
    """
    return torch.cat(list(_likelihood_chunks(head, hidden, targets)))


def _likelihood_chunks(head: TokenHead, hidden: Tensor, targets: Tensor) -> Iterator[Tensor]:
    count = max(1, CHUNK_ELEMENTS // len(head.weight))
    for rows, ids in zip(torch.split(hidden, count), torch.split(targets, count), strict=True):
        logits = head.logits(rows).float()
        chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        yield torch.stack((chosen - logits.logsumexp(1), (chosen >= logits.amax(1)).float()), 1)


class ClassReadout(Readout):
    """See :data:`~engine.models.config.HeadPooling`."""

    kind = wire.Classes

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._lengths: list[int] = []

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        if not segment.completes:
            return
        self.branches.append(branch)
        config, tokens = self.context.decoder.config, len(segment.tokens)
        if config.head_pooling in ("mean", "late"):
            self.hidden_rows += range(row, row + tokens)
            self._lengths.append(tokens)
        else:
            self.hidden_rows.append(row if config.head_pooling == "cls" else row + tokens - 1)

    def queue(self, step: StepTensors, download: Download) -> None:
        hidden = step.hidden[self]
        if self._lengths:
            hidden = pooled(self.context.decoder.class_rows(hidden), self._lengths, "mean")
        parts = self.context.class_logits(hidden, self.branches)
        self._logits = [download.add(part) for part in parts]

    def read(self, result: StepResult) -> None:
        rows = [row for part in self._logits for row in part.tensor.tolist()]
        result.rows += zip(self.branches, rows, strict=True)


SMALLEST_NORM = 1e-12
"""Lower bound of the divisor of a normalisation, as in sentence-transformers."""


@dataclass(frozen=True, slots=True)
class _Pooled:
    """One segment of a branch, or the token of it that is pooled."""

    branch: Branch
    readout: wire.Embedding
    start: int
    """Place of its first token among the pooled ones of its branch."""
    tokens: int
    completes: bool


class EmbeddingReadout(Readout):
    """:attr:`~engine.requests.core.Branch.partial` has the sum over the tokens so far, where a step computes a part of a mean. That
    needs the hidden states of the whole prompt, so the prompt is in the branch and the prefix is empty.
    """

    kind = wire.Embedding

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._parts: list[_Pooled] = []

    @property
    def empty(self) -> bool:
        return not self._parts

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request, tokens = segment.request, len(segment.tokens)
        assert isinstance(request, ScoringRequest)
        readout = request.readout
        assert isinstance(readout, wire.Embedding)
        mode = self._pooling.mode
        if segment.completes:
            self.branches.append(branch)
        if mode in ("cls", "last") and not self._pooling.more:
            if segment.completes:
                self._parts.append(_Pooled(branch, readout, 0, 1, completes=True))
                self.hidden_rows.append(row if mode == "cls" else row + tokens - 1)
            return
        assert not len(request.prefix)
        left_out = min(readout.prompt_tokens, tokens - 1)
        self._parts.append(_Pooled(branch, readout, segment.start, tokens - left_out, segment.completes))
        self.hidden_rows += range(row + left_out, row + tokens)

    @property
    def _pooling(self) -> Pooling:
        pooling = self.context.decoder.config.pooling
        assert pooling is not None
        return pooling

    def queue(self, step: StepTensors, download: Download) -> None:
        hidden, pooling = step.hidden[self], self._pooling
        if not (pooling.projections or pooling.more):
            hidden = hidden[:, : max(part.readout.dimensions or hidden.shape[1] for part in self._parts)]
        vectors = pooled(hidden, [part.tokens for part in self._parts], *pooling.modes)
        self._vectors = download.add(self.context.decoder.projected(vectors) if pooling.projections else vectors)

    def read(self, result: StepResult) -> None:
        for part, row in zip(self._parts, self._vectors.tensor.numpy(), strict=True):
            earlier, own = part.branch.partial_before(part.start), row[: part.readout.dimensions]
            if earlier is None and part.completes:
                result.rows.append((part.branch, embedding(own, normalize=part.readout.normalize)))
                continue
            tokens = part.start + part.tokens
            total = own * part.tokens if earlier is None else earlier + own * part.tokens
            if part.completes:
                result.rows.append((part.branch, embedding(total / tokens, normalize=part.readout.normalize)))
            else:
                part.branch.partial = PartialRow(tokens, total)


def embedding(vector: npt.NDArray[np.float32], *, normalize: bool) -> list[float]:
    """A row of :class:`engine.wire.Scored`, scaled to length 1 where asked for."""
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), SMALLEST_NORM)
    return vector.tolist()  # type: ignore[no-any-return]


class TokenVectorReadout(Readout):
    """A vector for each token."""

    kind = wire.TokenVectors

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._parts: list[tuple[int, bool]] = []
        """Tokens of each branch, and whether its vectors are normalised."""

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request, tokens = segment.request, len(segment.tokens)
        assert isinstance(request, ScoringRequest)
        assert isinstance(request.readout, wire.TokenVectors)
        self.branches.append(branch)
        self.hidden_rows += range(row + request.first_tokens, row + tokens)
        self._parts.append((tokens - request.first_tokens, request.readout.normalize))

    def queue(self, step: StepTensors, download: Download) -> None:
        self._vectors = download.add(self.context.decoder.token_vectors(step.hidden[self]))

    def read(self, result: StepResult) -> None:
        parts = torch.split(self._vectors.tensor, [tokens for tokens, _ in self._parts])
        for branch, part, (_, normalized) in zip(self.branches, parts, self._parts, strict=True):
            vectors = torch.nn.functional.normalize(part, dim=1, eps=SMALLEST_NORM) if normalized else part
            result.rows.append((branch, vectors.flatten().tolist()))


class SparseReadout(Readout):
    """Weights of vocabulary entries, of all tokens of a sequence."""

    kind = wire.Sparse

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self._documents: list[tuple[Branch, Ints]] = []
        self._queries: list[tuple[Branch, Ints]] = []
        """Those whose weights are in a table."""
        assert isinstance(context.decoder, Encoder)
        self._encoder = context.decoder

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        request, tokens = segment.request, segment.tokens
        assert isinstance(request, ScoringRequest)
        assert isinstance(request.readout, wire.Sparse)
        self.branches.append(branch)
        if request.readout.query and self._encoder.query_weights is not None:
            self._queries.append((branch, tokens))
            return
        self.hidden_rows += range(row, row + len(tokens))
        self._documents.append((branch, tokens))

    def queue(self, step: StepTensors, download: Download) -> None:
        if not self._documents:
            return
        encoder, hidden = self._encoder, step.hidden[self]
        if encoder.config.sparse == "vocabulary":
            parts = torch.split(hidden, [tokens.size for _, tokens in self._documents])
            self._weights = download.add(torch.stack([encoder.vocabulary_weights(part) for part in parts]))
        else:
            self._weights = download.add(encoder.token_weights(hidden))

    def read(self, result: StepResult) -> None:
        table = self._encoder.query_weights
        for branch, tokens in self._queries:
            assert table is not None
            result.rows.append((branch, self._encoder.weights_of_tokens(tokens, table[torch.from_numpy(tokens)].numpy())))
        if not self._documents:
            return
        weights = self._weights.tensor.numpy()
        if self._encoder.config.sparse == "vocabulary":
            for (branch, _), row in zip(self._documents, weights, strict=True):
                ids = np.flatnonzero(row)
                result.rows.append((branch, id_weight_pairs(ids, row[ids])))
            return
        ends = np.cumsum([tokens.size for _, tokens in self._documents])
        for (branch, tokens), row in zip(self._documents, np.split(weights, ends[:-1]), strict=True):
            result.rows.append((branch, self._encoder.weights_of_tokens(tokens, row)))


class LengthValueReadout(Readout):
    """The length model computes the values from :attr:`segment_indices`, in the same pass as guided draws."""

    kind = wire.LengthValue

    def __init__(self, context: ReadoutContext, batch: Batch) -> None:
        super().__init__(context, batch)
        self.segment_indices: list[int] = []
        """Segments of the batch on the length model whose last token is valued."""

    def add(self, segment: ExtendSegment, branch: Branch, row: int, index: int) -> None:  # noqa: ARG002
        if segment.completes:
            self.branches.append(branch)
            self.segment_indices.append(index)

    def queue(self, step: StepTensors, download: Download) -> None:
        assert step.guided is not None
        assert step.guided.values is not None
        self._values = download.add(step.guided.values)

    def read(self, result: StepResult) -> None:
        result.rows += [(branch, [z]) for branch, z in zip(self.branches, self._values.tensor.tolist(), strict=True)]
