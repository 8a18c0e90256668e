"""Log-probabilities of tokens, from tensors on the device to :class:`engine.wire.Logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

from engine import wire
from engine.device.transfer import Download
from kernels.largest import TokenLogprobs


class LogprobsCopy:
    """Token log-probabilities on their way to the host."""

    def __init__(self, download: Download, logprobs: TokenLogprobs) -> None:
        self._chosen = download.add(logprobs.chosen)
        self._top_tokens = download.add(logprobs.top_tokens)
        self._top = download.add(logprobs.top)

    def read(self, counts: Sequence[int]) -> list[wire.Logprobs]:
        """One message for each row. counts: alternatives of each row."""
        columns = (copy.tensor.tolist() for copy in (self._chosen, self._top_tokens, self._top))
        rows = zip(*columns, counts, strict=True)
        return [wire.Logprobs([chosen], [ids[:count]], [top[:count]]) for chosen, ids, top, count in rows]


def join_logprobs(pieces: Sequence[wire.Logprobs]) -> wire.Logprobs:
    """Log-probabilities of consecutive tokens as one message."""
    return wire.Logprobs(
        [value for piece in pieces for value in piece.chosen],
        [ids for piece in pieces for ids in piece.top_tokens],
        [values for piece in pieces for values in piece.top],
        [values for piece in pieces for values in piece.values],
    )
