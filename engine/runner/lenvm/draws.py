"""Guided draws of one step: candidates, one forward pass of the length model, tilt, draw, adoption, for all rows at once.

The candidates of a draw are one-token branches behind all tokens that the length model knows of the text, so the forward pass
reads each prefix once. The same pass computes tokens that the length model has not seen yet, and the step's other segments on it.
Keys and values of candidates are kept for the step only; those of the drawn candidate are written to the slot that the scheduler
allocated for it. The host chooses slots and the device chooses tokens, so neither waits for the other.

**Two forms.** On a GPU every guided row has as many candidates as its request may have, in parts of equal width
(:mod:`engine.runner.lenvm.passes`), and rows that are decided without the length model are computed like the others, because the
host would have to read the device to leave them out. On a CPU this read costs nothing, so only real candidates of undecided rows
are computed; the pending tokens of the other rows stay pending. Both forms draw the same tokens. A pass of the first form without
other segments may be replayed from a CUDA graph (:mod:`engine.runner.lenvm.graphs`), and if few of its candidates are probably
needed, from one that the device ends behind these.

As with :mod:`engine.runner.sampling`, what all draws of a request have in common is packed once, as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.models.decoder import FusedAttend
from yardstick_llm.engine.models.lenvm import LenVM
from yardstick_llm.engine.models.transfer import Upload
from yardstick_llm.engine.requests.batch import CandidatePass, ExtendSegment, Tokens
from yardstick_llm.engine.requests.generation import spread_of, target
from yardstick_llm.engine.runner.attention.base import AttentionBackend
from yardstick_llm.engine.runner.images import StepImages
from yardstick_llm.engine.runner.lenvm.graphs import Needs, Packed, PassGraphs, pack_needed
from yardstick_llm.engine.runner.lenvm.passes import (
    LenVMOutput,
    LenVMPass,
    Parts,
    PassAttention,
    equal_parts,
    exact_parts,
    position_of,
    shifts_of,
)
from yardstick_llm.engine.runner.sampling import SamplingBatch, SamplingRows, edited, prepare
from yardstick_llm.kernels.candidates import Candidates, candidates
from yardstick_llm.kernels.largest import MOST, SMALLEST_TEMPERATURE
from yardstick_llm.kernels.length_tilt import RULES, Tilts, length_tilt, needs_value
from yardstick_llm.kernels.seeded_sampling import seeded_choice

LEAST_WINDOW = 0.5
"""Half of the narrowest window of ``about``, in tokens."""

GUIDANCE = np.dtype(
    [
        ("rule", "i8"),
        *((name, "f8") for name in ("scale", "log_gamma", "value_min", "entropy_threshold", "end_min_p")),
    ]
)
"""Guidance of a request. rule: its place in :data:`RULES`; log_gamma: NaN for the length model's own; end_min_p: NaN for None."""


@dataclass(slots=True)
class GuidedRows:
    """Guided draws of one step, [rows] each unless said otherwise."""

    sampling: SamplingRows = field(default_factory=SamplingRows)
    packed: list[bytes] = field(default_factory=list)
    """:func:`pack_guidance`"""
    top_k: list[int] = field(default_factory=list)
    """Most candidates."""
    ends: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens, beside the end of sequence, that end the section."""
    passes: list[CandidatePass] = field(default_factory=list)
    any_chosen: bool = False
    """Whether some row has a constraint that excludes candidates; rows of temperature 0 have one."""
    any_end: bool = False
    """Whether some row has ``end_min_p``."""
    targets: dict[int, tuple[wire.LengthGuidance, int]] = field(default_factory=dict)
    """Guidance of the rows that have a constraint, by place, and the output tokens drawn so far of the guided section."""

    def __len__(self) -> int:
        return len(self.packed)


class Parameters(NamedTuple):
    """Parameters of guided rows on the device, [rows] each unless said otherwise."""

    top_k: Tensor
    """int64"""
    ends: Tensor
    """[rows, tokens] int64: tokens that end the text; -1 fills short rows."""
    entropy_thresholds: Tensor
    """float32"""
    tilts: Tilts
    end_min_p: Tensor
    """float64; NaN where it is None"""


def pack_guidance(guidance: wire.LengthGuidance) -> bytes:
    """Return ``guidance`` as :data:`GUIDANCE`."""
    rule = RULES.index(guidance.constraint or guidance.mode)
    log_gamma = math.log(guidance.gamma) if guidance.gamma else math.nan
    end_min_p = math.nan if guidance.end_min_p is None else guidance.end_min_p
    row = (rule, guidance.scale, log_gamma, guidance.value_min, guidance.entropy_threshold, end_min_p)
    return np.array([row], GUIDANCE).tobytes()


def prepare_guidance(
    rows: GuidedRows,
    gamma: float,
    eos_ids: Sequence[int],
    device: torch.device,
    calibration: wire.Calibration | None,
    spread: tuple[float, float],
) -> Parameters:
    """Copy the parameters to the device in one copy that the host does not wait for. ``gamma``, ``calibration`` and ``spread``, see
    :func:`spread_of`: the length model's own."""
    table = np.frombuffer(b"".join(rows.packed), GUIDANCE)
    log_gammas = np.where(np.isnan(table["log_gamma"]), math.log(gamma), table["log_gamma"])
    aims, scales, spreads = np.zeros(len(rows)), table["scale"].copy(), np.tile(spread, (len(rows), 1)).T
    for row, (guidance, drawn) in rows.targets.items():
        aims[row] = target(guidance, drawn, guidance.gamma or gamma, calibration)
        if guidance.constraint == "about":
            scales[row] = max(wire.WINDOW * (guidance.target_length or 0), LEAST_WINDOW)
    upload = Upload()
    top_k, rule, end_ids = upload.add(rows.top_k), upload.add(table["rule"]), upload.add(_end_table(rows.ends, eos_ids))
    floats = np.stack([scales, log_gammas, aims, table["value_min"], *spreads, table["entropy_threshold"], table["end_min_p"]])
    packed = upload.add(floats.view(np.int64))
    upload.send(device)
    *tilted, entropy, end_min_p = packed.tensor.view(torch.float64).view(len(floats), -1)
    tilts = Tilts(rule.tensor, *tilted)
    return Parameters(top_k.tensor, end_ids.tensor.view(len(rows), -1), entropy.float(), tilts, end_min_p)


def _end_table(ends: Sequence[tuple[int, ...]], eos_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """[rows, most tokens]: ``eos_ids`` and the row's ``ends``. Most rows have the same."""
    distinct = {each: place for place, each in enumerate(dict.fromkeys(ends))}
    table = np.full((len(distinct), max(1, len(eos_ids) + max(map(len, distinct)))), -1, np.int64)
    for each, place in distinct.items():
        ids = (*eos_ids, *each)
        table[place, : len(ids)] = ids
    return table[[distinct[each] for each in ends]]


FEW = 8
"""Columns of the table of candidates if no row may have more; otherwise there are :data:`~kernels.largest.MOST`. Each number is
a kernel to compile."""

Resolve = Callable[[Tensor, Sequence[ExtendSegment]], Tensor]
"""Fills in the tokens of some segments that the step before draws: (tokens on the device, the segments) -> tokens."""


class GuidedDraws(NamedTuple):
    """Guided draws, [rows, width] each unless said otherwise, on the device."""

    tokens: Tensor
    """[rows] int64"""
    ids: Tensor
    """int64, the candidates first"""
    chosen: Tensor
    """[rows, 1] int64: place of the token among them"""
    probabilities: Tensor
    """float32: the distribution of the draw; 0 beyond the candidates."""
    raw: Tensor
    """float32, raw values of the candidates"""
    ends: Tensor
    """bool: candidates that end the section"""
    undecided: Tensor
    """[rows] bool: whether the length model evaluated the row"""
    counts: Tensor
    """[rows] int64: number of candidates"""

    @property
    def logprobs(self) -> Tensor:
        """[rows] float32, of the tokens"""
        return self.probabilities.gather(1, self.chosen).squeeze(1).log()

    @property
    def values(self) -> Tensor:
        """float32, of the candidates; NaN in rows that were decided without the length model"""
        values = self.raw.sigmoid().masked_fill(self.ends, 0.0)
        return values.masked_fill(~self.undecided.unsqueeze(1), float("nan"))


class GuidedStep(NamedTuple):
    """Results of the length model's pass in one step."""

    draws: GuidedDraws | None
    """None if the step has no guided draw."""
    values: Tensor | None
    """[valued segments] float32, raw; None if there are none."""
    skipped: list[CandidatePass]
    """Passes that were not computed, because the draw was decided without the length model."""
    needs: Needs
    """For the reader of the results to note what the draws needed."""
    counted: bool = False
    """Whether of decided draws only the drawn token was computed (:mod:`engine.runner.lenvm.graphs`)."""


class Placed(NamedTuple):
    """:class:`~engine.runner.lenvm.passes.Parts` on the device, and what belongs to their rows; int64."""

    width: int
    """Most candidates of a part."""
    rows: Tensor
    first: Tensor
    places: Tensor
    branch_of: Tensor
    """[rows · columns]"""
    computed: Tensor
    """[computed rows]: those that have parts"""
    slots: Tensor
    """[computed rows]: of their drawn tokens"""
    lengths: Tensor
    """[rows]: positions of the candidates"""

    @classmethod
    def of(cls, parts: Parts, passes: Sequence[CandidatePass], device: torch.device) -> Placed:
        """One copy to the device. passes: [rows]"""
        computed, upload = parts.rows[parts.first == 0], Upload()
        slots = [passes[row].slot for row in computed.tolist()]
        lengths = [position_of(candidate_pass) for candidate_pass in passes]
        numbers = (parts.rows, parts.first, parts.places, parts.branch_of, computed, slots, lengths)
        copies = [upload.add(values) for values in numbers]
        upload.send(device)
        return cls(int(parts.branches.max(initial=0)), *(copy.tensor for copy in copies))

    def given(self, found: Candidates) -> tuple[Tensor, Tensor]:
        """Token of each branch, and the number of real candidates of each part."""
        tokens = found.ids.flatten().index_select(0, self.places)
        return tokens, (found.counts.index_select(0, self.rows) - self.first).clamp(0, self.width)


class LenVMRunner:
    """Owns the length model and, through the attention backend, its keys and values."""

    def __init__(
        self,
        model: LenVM,
        attention: AttentionBackend,
        gamma: float,
        eos_ids: Sequence[int],
        graphs: PassGraphs | None = None,
        images: StepImages | None = None,
        calibration: wire.Calibration | None = None,
        *,
        compact: bool,
    ) -> None:
        """``calibration``: of the length model, for guidance with a confidence.

        ``compact``: the second form of the module docstring, which reads the device and needs no graphs.
        """
        assert graphs is None or not compact
        self._model = model
        self._attention = attention
        self._gamma = gamma
        self._eos = tuple(eos_ids)
        self._calibration = calibration
        self._spread = spread_of(calibration)
        self._graphs = graphs
        self._images = images or StepImages()
        self._compact = compact
        self._needs = Needs()
        self._device = attention.kv.keys.device

    @property
    def replayed(self) -> int:
        """Number of passes that were replayed from a CUDA graph."""
        return 0 if self._graphs is None else self._graphs.replayed

    @property
    def replayed_counted(self) -> int:
        """Number of those that computed needed candidates only."""
        return 0 if self._graphs is None else self._graphs.replayed_counted

    def draw_guided(
        self, logits: Tensor, rows: GuidedRows, segments: Sequence[ExtendSegment], valued: Sequence[int], resolve: Resolve
    ) -> GuidedStep:
        """Draw the next token of ``rows``, in a pass that computes ``segments`` too.

        logits: [rows, vocab] float32; head rows that the length model lacks are padding. valued: indices of the ``segments`` whose
        last token is valued.
        """
        sampling, parameters, found = self._candidates(logits, rows)
        undecided = needs_value(found, parameters.entropy_thresholds)
        parts = self._parts(rows, found, undecided)
        at = parts.rows[parts.first == 0].tolist()
        passes = [rows.passes[row] for row in at]
        segments = [
            *segments,
            *(candidate_pass.pending for candidate_pass in passes if candidate_pass.pending is not None),
        ]
        placed = Placed.of(parts, rows.passes, self._device)
        work = LenVMPass(
            segments, valued, [rows.passes[row] for row in parts.rows.tolist()], parts.branches.tolist(), *placed.given(found)
        )
        prefixes = [candidate_pass.prefix for candidate_pass in work.passes]
        bucket = None if segments else self._counted_bucket(prefixes, placed.width)
        if bucket is None:
            table, passed = placed.branch_of.view(found.ids.shape), self._forward(work, resolve)
        else:
            alone = _tempered(found.probabilities, sampling, parameters, rows)
            drawn = _choice(alone, found.ids, sampling, rows)  # right for rows that are decided
            packed = pack_needed(found, undecided, drawn, placed.lengths, placed.rows, placed.first, placed.width)
            table, passed = packed.branch_of, self._forward_counted(prefixes, placed.width, bucket, packed)
        z = self._table(passed.branches, table)
        ends = (found.ids.unsqueeze(-1) == parameters.ends.unsqueeze(1)).any(-1)
        p = length_tilt(found.probabilities, z, ends, undecided, parameters.tilts)
        p = _tempered(p, sampling, parameters, rows)
        chosen = _choice(p, found.ids, sampling, rows)
        self._adopt(passed, table.gather(1, chosen).squeeze(1).index_select(0, placed.computed), placed.slots)
        draws = GuidedDraws(
            tokens=found.ids.gather(1, chosen).squeeze(1),
            ids=found.ids,
            chosen=chosen,
            probabilities=p,
            raw=z,
            ends=ends,
            undecided=undecided,
            counts=found.counts,
        )
        kept = set(at)
        skipped = [each for row, each in enumerate(rows.passes) if row not in kept]
        return GuidedStep(draws, passed.ends, skipped, self._needs, counted=bucket is not None)

    def compute(self, segments: Sequence[ExtendSegment], valued: Sequence[int], resolve: Resolve) -> GuidedStep:
        """Run a pass without draws. valued: indices of the ``segments`` whose last token is valued."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        output = self._forward(LenVMPass(segments, valued, [], [], nothing, nothing), resolve)
        return GuidedStep(None, output.ends, [], self._needs)

    def _candidates(self, logits: Tensor, rows: GuidedRows) -> tuple[SamplingBatch, Parameters, Candidates]:
        """Return sampling and tilt parameters of each row, and its candidates. logits: see :meth:`draw_guided`."""
        sampling = prepare(rows.sampling, self._device)
        logits = logits[:, : self._model.config.vocab_size].contiguous()
        parameters = prepare_guidance(rows, self._gamma, self._eos, self._device, self._calibration, self._spread)
        columns = FEW if max(rows.top_k) <= FEW else MOST
        columns = min(columns, 1 << logits.shape[1].bit_length() - 1)
        temperatures = sampling.temperatures
        if rows.any_chosen:
            temperatures = torch.where(chooses(parameters), 1.0, temperatures)
        logits = edited(logits, sampling)
        found = candidates(logits, temperatures, parameters.top_k, sampling.top_p, sampling.floors.exp(), columns)
        if rows.any_end:
            found = with_end(found, logits, temperatures, parameters)
        return sampling, parameters, found

    def _parts(self, rows: GuidedRows, found: Candidates, undecided: Tensor) -> Parts:
        """The candidates to compute, in either form."""
        columns = found.ids.shape[1]
        if not self._compact:
            return equal_parts(rows.top_k, columns)
        return exact_parts((found.counts * undecided).numpy(), columns)

    def _counted_bucket(self, prefixes: Sequence[Ints], width: int) -> int | None:
        """Parts of the captured pass that computes needed candidates only; None where all are computed."""
        if self._graphs is None or not self._needs.few:
            return None
        return self._graphs.counted_bucket(prefixes, width)

    def _forward_counted(self, prefixes: Sequence[Ints], width: int, bucket: int, packed: Packed) -> LenVMOutput:
        assert self._graphs is not None
        return LenVMOutput(self._graphs.forward_counted(prefixes, width, bucket, packed), None, self._graphs.kept)

    def _table(self, branches: Tensor | None, branch_of: Tensor) -> Tensor:
        """Raw values in a table like ``branch_of``, 0 where none was computed. branches: [branches] float32"""
        if branches is None:
            return torch.zeros(branch_of.shape, device=branch_of.device)
        padded = torch.cat([branches, branches.new_zeros(1)])
        return padded.index_select(0, branch_of.flatten()).view(branch_of.shape)

    def _forward(self, work: LenVMPass, resolve: Resolve) -> LenVMOutput:
        segments, valued, passes, branches, _, _ = work
        if not segments and not passes:
            return LenVMOutput(None, None, None)
        if not segments and self._graphs is not None:
            prefixes = [candidate_pass.prefix for candidate_pass in passes]
            shifts = None if self._model.config.vision is None else shifts_of(passes, self._device)
            raw = self._graphs.forward(prefixes, branches[0], work.tokens, work.counts, shifts)
            if raw is not None:
                return LenVMOutput(raw, None, self._graphs.kept)
        upload = Upload()
        known_tokens = Tokens.of(segments)
        self._images.place(known_tokens, segments, upload, on_lenvm=True)
        tokens = upload.add(known_tokens.ids)
        positions = upload.add(
            np.concatenate(
                [known_tokens.positions, np.repeat([position_of(candidate_pass) for candidate_pass in passes], branches)]
            )
        )
        ends = np.cumsum([len(segment.tokens) for segment in segments])
        known = sum(len(segment.tokens) for segment in segments)
        read = [*(ends[list(valued)] - 1 if valued else ()), *range(known, known + sum(branches))]
        rows = upload.add(read or [0])  # prompts whose keys alone are needed
        upload.send(self._device)
        self._images.insert(on_lenvm=True)
        all_tokens = torch.cat([resolve(tokens.tensor, segments), work.tokens])
        attend = self._attend(work)
        hidden = self._model(all_tokens, positions.tensor, FusedAttend(attend), rows.tensor if segments else None)
        return LenVMOutput(
            branches=self._model.head(hidden[len(valued) :]) if passes else None,
            ends=self._model.head(hidden[: len(valued)]) if valued else None,
            kept=attend.kept,
        )

    def _attend(self, work: LenVMPass) -> PassAttention:
        return PassAttention(self._attention, work)

    def _adopt(self, passed: LenVMOutput, chosen: Tensor, slots: Tensor) -> None:
        """Write keys and values of the branches ``chosen`` to ``slots``, [computed rows] both."""
        if passed.kept is not None:
            passed.kept.adopt(chosen, self._attention.kv, slots)


def with_end(found: Candidates, logits: Tensor, temperatures: Tensor, parameters: Parameters) -> Candidates:
    """Add the most probable end token to rows whose ``end_min_p`` it reaches, behind their other candidates.

    logits: [rows, vocab], edited; temperatures: [rows]. The host reads nothing.
    """
    ends, width = parameters.ends, found.ids.shape[1]
    known = (ends >= 0) & (ends < logits.shape[1])
    of_ends = logits.gather(1, ends.clamp(0, logits.shape[1] - 1)).masked_fill(~known, -math.inf)
    logit, place = of_ends.max(1, keepdim=True)
    end = ends.gather(1, place)  # [rows, 1], like the next three
    share = ((logit - logits.gather(1, found.ids[:, :1])) / temperatures.clamp(min=SMALLEST_TEMPERATURE).unsqueeze(1)).exp()
    most, counts = parameters.top_k.clamp(max=width).unsqueeze(1), found.counts.unsqueeze(1)
    column = torch.minimum(counts, most - 1)
    columns = torch.arange(width, device=logits.device)
    has = ((found.ids == end) & (columns < counts)).any(1, keepdim=True)
    adds = ~has & (share > 0) & (share.double() >= parameters.end_min_p.unsqueeze(1)) & (most > 1)
    here = adds & (columns == column)
    p = torch.where(here, found.probabilities[:, :1] * share, found.probabilities)
    return Candidates(
        ids=torch.where(here, end, found.ids),
        probabilities=torch.where(adds, p / p.sum(1, keepdim=True), p),
        counts=torch.where(adds, column + 1, counts).squeeze(1),
    )


def chooses(parameters: Parameters) -> Tensor:
    """Rows whose constraint excludes candidates, [rows] bool. Their candidates are those of temperature 1."""
    rule = parameters.tilts.rule
    return (rule >= RULES.index("eq")) & (rule <= RULES.index("about"))


def _tempered(p: Tensor, sampling: SamplingBatch, parameters: Parameters, rows: GuidedRows) -> Tensor:
    """Give the candidates that are left in rows of :func:`chooses` their own temperature."""
    if not rows.any_chosen:
        return p
    temperatures = sampling.temperatures.unsqueeze(1)
    tempered = (p.log() / temperatures.clamp(min=SMALLEST_TEMPERATURE)).softmax(-1)
    return torch.where(chooses(parameters).unsqueeze(1) & (temperatures > 0) & (temperatures != 1), tempered, p)


def _choice(p: Tensor, ids: Tensor, sampling: SamplingBatch, rows: GuidedRows) -> Tensor:
    """:func:`seeded_choice`; the most probable candidate in rows of temperature 0."""
    chosen = seeded_choice(p, ids, sampling.keys)
    if not rows.any_chosen:
        return chosen
    return torch.where((sampling.temperatures > 0).unsqueeze(1), chosen, p.argmax(-1, keepdim=True))
