"""Every backend against the reference, step after step on shared and scattered slots."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.engine.device import skip_without_flashinfer
from tests.engine.test_loop import run as run_loop
from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import EMPTY, Ints, as_ints
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.decoder import FusedAttend, Heads, PlainAttend
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.requests.core import Request
from yardstick_llm.engine.runner.attention import flashinfer
from yardstick_llm.engine.runner.attention.base import AttentionBackend, KVCache
from yardstick_llm.engine.runner.attention.flashinfer import FixedFlashInfer, FlashInferAttention, send
from yardstick_llm.engine.runner.attention.native import NativeAttention
from yardstick_llm.engine.runner.attention.reference import ReferenceAttention
from yardstick_llm.engine.runner.attention.triton import TritonAttention
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import linear_qk_norm_rope, linear_silu_mul
from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYERS = 2
LONG = [(torch.bfloat16, group) for group in range(1, 9)] + [(torch.float16, 1), (torch.float16, 8)]
CPU = torch.device("cpu")

Backend = Callable[..., AttentionBackend]


@dataclass
class Pool:
    """Free slots, in no order."""

    free: Ints

    def take(self, count: int) -> Ints:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return taken


def run(context: Ints, new: int) -> ExtendSegment:
    return ExtendSegment(Request(id="r", prefix=EMPTY), None, np.zeros(new, np.int32), context)


def steps(generator: np.random.Generator, slots: int, longest: int) -> list[list[ExtendSegment]]:
    """Two queries with items, in the same step and, cached, in the next; a prompt in chunks; two sequences that are decoded.

    One of them is of one token, and one of ``longest``.
    """
    pool = Pool(generator.permutation(slots).astype(np.int32))
    lengths = generator.permutation([1, longest, generator.integers(1, longest)])
    queries = [pool.take(length) for length in lengths[:2]]
    prompt, cut = pool.take(lengths[2] + 3), int(generator.integers(1, lengths[2] + 2))
    item_lengths = generator.integers(1, min(40, longest), 6)

    def items() -> list[ExtendSegment]:
        return [run(as_ints([queries[nth % 2], pool.take(length)]), length) for nth, length in enumerate(item_lengths)]

    first = [run(query, len(query)) for query in queries] + items() + [run(prompt[:cut], cut)]
    second = [run(prompt[:-2], len(prompt) - 2 - cut), *items()] if cut < len(prompt) - 2 else items()
    return [first, second, [run(prompt[:-1], 1)], [run(prompt, 1), *items()[:1]]]


def attended(backend: AttentionBackend, segments: list[ExtendSegment], heads: Sequence[Heads]) -> Tensor:
    """[layers, tokens, heads, head_dim]; each layer has its own ``heads``."""
    attend, device = backend.plan(segments).attend, backend.kv.keys.device
    return torch.stack([attend(layer, there(part, device)).cpu() for layer, part in enumerate(heads)])


def there(heads: Heads, device: torch.device) -> Heads:
    tensors = {name: value.to(device) for name in Heads.__slots__ if isinstance(value := getattr(heads, name), Tensor)}
    return replace(heads, **tensors)


def random_heads(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, turned: bool) -> Heads:
    """``turned``: by random angles, after norms with random weights; else as they are, so that what is written is exact."""
    angles = torch.randn(tokens, head_dim // 2) * 100 if turned else torch.zeros(tokens, head_dim // 2)
    weights = torch.randn(2, head_dim).to(dtype) if turned else (None, None)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    return Heads(qkv, kv_heads, *weights, 1e-6, angles.cos(), angles.sin())


def compare(
    make: Backend,
    device: torch.device,
    seed: int,
    longest: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kv_heads: int = 2,
    layers: int = LAYERS,
    turned: bool = False,
    specs: Sequence[AttentionSpec] = (),
    exact: torch.dtype | None = None,
) -> None:
    """The reference computes in ``exact``: on a CPU in the same dtype unless given, on a GPU in float64."""
    generator = np.random.default_rng(seed)
    tolerance = TOLERANCE[dtype] * (2 if turned else 1)  # queries and keys are rounded, too
    slots, heads = 4 * longest + 600, group * kv_heads
    exact = exact or (torch.float64 if device.type == "cuda" else dtype)
    backend, reference = (
        kind(KVCache(layers=layers, slots=slots, kv_heads=kv_heads, head_dim=head_dim, dtype=kept, device=device), heads, specs)
        for kind, kept in ((make, dtype), (ReferenceAttention, exact))
    )
    for segments in steps(generator, slots, longest):
        tokens = sum(len(one.tokens) for one in segments)
        given = [random_heads(tokens, heads, kv_heads, head_dim, dtype, turned=turned) for _ in range(layers)]
        wide = [replace(each, qkv=each.qkv.to(exact)) for each in given]
        found, expected = attended(backend, segments, given), attended(reference, segments, wide)
        torch.testing.assert_close(found, expected.to(dtype), atol=tolerance, rtol=tolerance)
    if turned:
        torch.testing.assert_close(backend.kv.keys, reference.kv.keys.to(dtype), atol=tolerance, rtol=tolerance)
    else:
        assert torch.equal(backend.kv.keys, reference.kv.keys.to(dtype))
    assert torch.equal(backend.kv.values, reference.kv.values.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "head_dim"), [(7, 16), (1, 32), (2, 128)])
def test_triton(group: int, head_dim: int, device: torch.device) -> None:
    compare(TritonAttention, device, group, 20, group, head_dim, torch.float32, layers=2 if group == 1 else 1)


@pytest.mark.slow
def test_triton_with_specs(device: torch.device) -> None:
    """Layers with and without a window, whose steps share a layout."""
    specs = [AttentionSpec(0.4, 7, 2.0), AttentionSpec(0.4, None, 2.0)]
    compare(TritonAttention, device, 2, 20, 2, 32, torch.float32, specs=specs)


@pytest.mark.slow
def test_triton_normalises_and_rotates(device: torch.device) -> None:
    compare(TritonAttention, device, 3, 20, 2, 64, torch.float32, turned=True)


@pytest.mark.parametrize("longest", [20, 700])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (7, 16), (1, 80), (2, 128)])
def test_compiled_loops(group: int, head_dim: int, longest: int) -> None:
    specs = [AttentionSpec(0.4, 7, 2.0), AttentionSpec(0.3, None)]
    compare(NativeAttention, CPU, group, longest, group, head_dim, torch.float32, specs=specs, turned=True)


@pytest.mark.parametrize("turned", [False, True])
def test_the_reference_in_double_precision(turned: bool) -> None:
    """As it computes on a GPU."""
    compare(ReferenceAttention, CPU, 5, 20, 2, 32, torch.bfloat16, turned=turned, exact=torch.float64)


@pytest.mark.slow
def test_triton_on_a_long_layout(device: torch.device) -> None:
    longest = 300 if device.type == "cuda" else 130  # the interpreter takes minutes for more
    compare(TritonAttention, device, 4, longest, 7, 64, torch.float32, layers=1)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "group"), [*LONG, (torch.float32, 1), (torch.float32, 8)])
def test_triton_on_long_layouts(dtype: torch.dtype, group: int, device: torch.device) -> None:
    compare(TritonAttention, device, group, 20_000, group, 128, dtype, turned=dtype != torch.float32)


def coded(kv_heads: int = 2, layers: int = LAYERS) -> Tensor:
    """Scales of FP8 keys and values, another for each layer and head."""
    return torch.exp2(torch.arange(-6.0, -6 + layers * 2 * kv_heads)).view(layers, 2, kv_heads)


def compare_codes(
    make: Backend, device: torch.device, group: int, head_dim: int, dtype: torch.dtype, bound: float, *, longest: int = 20
) -> None:
    """Attention to FP8 keys and values beside that to float32 ones: the mean error is within ``bound`` of the mean result."""
    torch.manual_seed(group)
    generator = np.random.default_rng(group)
    slots, heads = 4 * longest + 600, 2 * group
    backend, reference = (
        kind(KVCache(layers=LAYERS, slots=slots, kv_heads=2, head_dim=head_dim, dtype=each, device=at, scales=scales), heads)
        for kind, each, at, scales in (
            (make, dtype, device, coded().to(device)),
            (ReferenceAttention, torch.float32, CPU, None),
        )
    )
    for segments in steps(generator, slots, longest):
        tokens = sum(len(one.tokens) for one in segments)
        given = [random_heads(tokens, heads, 2, head_dim, dtype, turned=False) for _ in range(LAYERS)]
        wide = [there(heads, CPU) for heads in given]
        wide = [replace(each, qkv=each.qkv.float()) for each in wide]
        found, expected = attended(backend, segments, given).float(), attended(reference, segments, wide)
        assert (found - expected).abs().mean() < bound * expected.abs().mean()
        assert (found - expected).abs().mean() > 0.003 * expected.abs().mean(), "nothing was rounded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_with_codes(dtype: torch.dtype) -> None:
    """A code differs by 2.4 % on average from what it stands for."""
    compare_codes(ReferenceAttention, CPU, 3, 32, dtype, 0.05)


def test_triton_with_codes(device: torch.device) -> None:
    class Reading(TritonAttention):
        make_ready = staticmethod(qk_norm_rope_write_reference)  # the interpreter does not carry when it rounds to FP8

    compare_codes(TritonAttention if device.type == "cuda" else Reading, device, 2, 32, torch.float32, 0.05)


@pytest.mark.gpu
def test_flashinfer_with_codes(device: torch.device) -> None:
    skip_without_flashinfer(device, 128, torch.bfloat16, torch.float8_e4m3fn)
    compare_codes(FlashInferAttention, device, 4, 128, torch.bfloat16, 0.05, longest=2000)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "group"), LONG)
@pytest.mark.parametrize("longest", [150, 20_000])
def test_flashinfer(longest: int, dtype: torch.dtype, group: int, device: torch.device) -> None:
    skip_without_flashinfer(device, 128, dtype)
    compare(FlashInferAttention, device, group, longest, group, 128, dtype, turned=True)


class Interpreted:
    """Computes what FlashInfer's kernel computes from the tables of an unsplit plan (``BatchPrefillWithPagedKVCacheKernel``)."""

    scale = 1.0

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor) -> None:
        wrapper: Any = self
        info, tables = wrapper._plan_info, wrapper._int_workspace_buffer
        request, tile, part, place, chunk = (tables[info[at] // 4 :] for at in (4, 5, 6, 8, 9))
        keys, values = (kept.squeeze(1).repeat_interleave(q.shape[1] // kept.shape[2], 1).float() for kept in pages)
        group, queries, contexts = q.shape[1] // pages[0].shape[2], wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf
        assert chunk[0] == np.iinfo(np.int32).max
        assert len(contexts) == len(queries) == len(wrapper._paged_kv_last_page_len_buf) + 1 == wrapper._batch_size + 1
        for nth in range(info[0]):
            segment = int(request[nth])
            begin, end = (int(bound) for bound in queries[segment : segment + 2])
            listed = wrapper._paged_kv_indices_buf[contexts[segment] : contexts[segment + 1]].long()
            assert (part[nth], place[segment]) == (0, begin)
            for row in range(int(tile[nth]) * info[3], min((int(tile[nth]) + 1) * info[3], (end - begin) * group)):
                token, offset = divmod(row, group)
                seen = listed[: len(listed) - (end - begin) + token + 1]
                heads = torch.arange(offset, q.shape[1], group)
                scores = torch.einsum("hd,shd->hs", q[begin + token, heads].float(), keys[seen][:, heads]) * self.scale
                out[begin + token, heads] = torch.einsum("hs,shd->hd", scores.softmax(-1), values[seen][:, heads]).to(out.dtype)


class FixedTables(AttentionBackend):
    """Plans each step through tables of fixed size; ``size`` tokens, of which some are padding."""

    layouts: ClassVar[set[int]] = set()

    def __init__(self, backend: FlashInferAttention, size: int) -> None:
        super().__init__(backend.kv, backend.specs)
        self.size, self.fixed = size, FixedFlashInfer(backend, size)
        self.attends = [self.fixed.attend(size, layout).attend for layout in range(2)]

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        layout = self.fixed.fill(segments, self.size)
        assert layout is not None
        self.layouts.add(layout)

        def attend(layer: int, heads: Heads) -> Tensor:
            count = len(heads.qkv)
            padded = {
                name: getattr(heads, name).new_zeros(self.size, *getattr(heads, name).shape[1:]) for name in ("qkv", "cos", "sin")
            }
            for name, tensor in padded.items():
                tensor[:count] = getattr(heads, name)
            return self.attends[layout](layer, replace(heads, **padded))[:count]

        return FusedAttend(attend)

    def plan_branches(self, *_: Any) -> PlainAttend:
        raise NotImplementedError


def fixed_tables(size: int, kv: KVCache, heads: int, specs: Sequence[AttentionSpec]) -> FixedTables:
    return FixedTables(FlashInferAttention(kv, heads, specs), size)


def test_fixed_tables_describe_a_step_as_flashinfer_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few segments and many, with padding between steps of other lengths."""
    monkeypatch.setattr(Interpreted, "scale", 32**-0.5)
    monkeypatch.setattr(FlashInferAttention, "wrapper", lambda *_: Interpreted())
    monkeypatch.setattr(FixedTables, "layouts", set())
    for seed, size in ((1, 300), (2, 1300)):
        compare(partial(fixed_tables, size), CPU, seed, 40, 2, 32, torch.float32, layers=1)
    assert FixedTables.layouts == {0, 1}


def test_steps_that_no_layout_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferAttention, "wrapper", lambda *_: Interpreted())
    kv = KVCache(layers=1, slots=64, kv_heads=1, head_dim=32, dtype=torch.float32)
    fixed = FixedFlashInfer(FlashInferAttention(kv, 1), 320)
    one = np.arange(1, dtype=np.int32)
    assert fixed.fill([run(one, 1)] * 2, 320) == 0
    assert fixed.fill([run(one, 1)] * 20, 320) == 1
    assert fixed.fill([run(one, 1)] * 21, 320) is None
    monkeypatch.setattr(flashinfer, "MOST_LISTED", 39)
    assert fixed.fill([run(np.arange(20, dtype=np.int32), 1)] * 2, 320) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "group"), LONG)
@pytest.mark.parametrize("longest", [150, 3000])
def test_flashinfer_with_fixed_tables(longest: int, dtype: torch.dtype, group: int, device: torch.device) -> None:
    skip_without_flashinfer(device, 128, dtype)

    compare(partial(fixed_tables, 4 * longest + 600), device, group, longest, group, 128, dtype, turned=True)


def test_tables_travel_as_one() -> None:
    """Each as it was, and at a multiple of 16 bytes."""
    tables = [np.arange(size, dtype=np.int32) for size in (1, 0, 5, 4, 2)]
    sent = send(tables, CPU)
    assert [part.tolist() for part in sent] == [table.tolist() for table in tables]
    assert len({part.untyped_storage().data_ptr() for part in sent}) == 1
    assert all(part.storage_offset() % 4 == 0 for part in sent)


def test_memory_of_slots_is_taken_as_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    kv = KVCache(layers=8, slots=1 << 18, kv_heads=4, head_dim=64, dtype=torch.float32)
    assert resident() - before < 64 << 20 < kv.keys.nbytes
    assert not kv.keys[3, 12345].any()
    assert not kv.values[-1, -1].any()


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_products_with_what_follows(quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fused_products``: the kernels compute what separate launches do, and take the place of them in every layer."""
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 192}
    directory = make_checkpoint(tmp_path, "qwen3", **shape)
    calls = dict.fromkeys(("linear_qk_norm_rope_triton", "linear_silu_mul_triton"), 0)

    def counted(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(*given: Any, **named: Any) -> Tensor:
            calls[name] += 1
            return kernel(*given, **named)

        return count

    for module in (linear_qk_norm_rope, linear_silu_mul):
        monkeypatch.setattr(module, "MIN_ROWS", 1)
        monkeypatch.setattr(module, "launches", lambda *_: True)
        name = f"{module.__name__.rpartition('.')[2]}_triton"
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    # The reference attends, because the interpreter's products in bfloat16, those of the Triton backend among them, are wrong.
    settings = EngineSettings(model=str(directory), name="m", dtype="bfloat16" if quantize else "float16", quantize=quantize)
    settings = msgspec.structs.replace(settings, device="cpu", attention="reference", max_total_tokens=256)
    message, found = wire.Score("s", [5, 6, 7, 8], [[9, 10], [11], [12, 13, 14]], wire.Likelihood()), []
    for fused in (False, True):
        found.append(run_loop(build_loop(msgspec.structs.replace(settings, fused_products=fused)), message)[0].rows)
        assert any(calls.values()) == fused
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    assert calls["linear_qk_norm_rope_triton"] % layers == 0
    assert calls["linear_silu_mul_triton"] == calls["linear_qk_norm_rope_triton"]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=0.3 if quantize else 5e-3, rtol=0)
