"""Peaks of one H200, and the shares of them that docs/gpu-budget.md assumes."""

from __future__ import annotations

BF16, FP8, BANDWIDTH = 989e12, 1979e12, 4.8e12
"""Data sheet of one H200: dense operations and bytes a second."""
PRODUCTS, QUANTIZED_PRODUCTS, ATTENTION, COPIES = 0.80, 0.65, 0.35, 0.90
"""Shares of the peaks; docs/gpu-budget.md says where they come from."""
