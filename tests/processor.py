"""Marks of tests that need instructions of the processor, which not every x86-64 processor has."""

from __future__ import annotations

import pytest
import torch

from yardstick_llm.kernels.int8 import instructions
from yardstick_llm.kernels.linear import multiplies_bfloat16

_CAPABILITIES = torch.cpu.get_capabilities()
_PACKING = ("avx512_bw", "avx512_vl", "avx512_dq")

multiplies_bytes = pytest.mark.skipif(instructions() is None, reason="the processor does not multiply bytes")
bfloat16 = pytest.mark.skipif(not multiplies_bfloat16(), reason="the processor does not multiply bfloat16")
packs_bfloat16 = pytest.mark.skipif(
    not (_CAPABILITIES.get("avx_ne_convert") or all(map(_CAPABILITIES.get, _PACKING))),
    reason="oneDNN does not pack bfloat16 for this processor",
)

INT8 = pytest.param({"quantize": "int8"}, marks=multiplies_bytes, id="int8")
