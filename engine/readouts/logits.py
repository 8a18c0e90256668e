"""Label logits at the last token of each scored branch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.device.transfer import Download, Upload
from engine.models.modules import TokenHead
from engine.readouts.base import StepTensors
from engine.readouts.labels import LabelReadout, label_table
from engine.requests.core import RawLabels
from kernels.linear import linear
from kernels.row_chunks import row_chunks
from kernels.soft_cap import soft_cap


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
