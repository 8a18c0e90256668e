"""Fields by which a request asks for logits instead of scores or probabilities."""

from __future__ import annotations

from gateway.schemas.truncation import Truncation

NAMES_OF_VLLM = ("use_activation", "activation", "softmax")
"""Names of one field in the versions of vLLM."""


class Activation(Truncation, kw_only=True):
    """Fields by which a request asks for the numbers before the preset's activation."""

    raw_scores: bool | None = None
    """Return the logit before the preset's activation."""
    use_activation: bool | None = None
    """False means `raw_scores`, in the form of vLLM."""
    activation: bool | None = None
    """An older name of `use_activation`."""
    softmax: bool | None = None
    """An older name of `use_activation`."""

    @property
    def raw(self) -> bool:
        """Whether logits are asked for."""
        return bool(self.raw_scores) or any(getattr(self, name) is False for name in NAMES_OF_VLLM)
