"""The label ``model`` of metrics has a bounded number of values."""

from __future__ import annotations

from yardstick_llm.gateway.ops.metrics import OTHER, ModelLabels


def test_the_first_models_have_labels_and_later_ones_share_one() -> None:
    label = ModelLabels(2)
    assert [label(name) for name in ("a", None, "", "b", "c", "a", "d")] == ["a", "", "", "b", OTHER, "a", OTHER]
