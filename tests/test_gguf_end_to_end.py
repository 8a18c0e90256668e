"""GGUF files behind a real gateway and a real engine."""

from __future__ import annotations

import pytest

from tests import weights
from tests.processes import Pod, gateway_before
from tests.processor import multiplies_bytes
from yardstick_llm.engine import wire


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "tolerance"), [(("--dequantize", "off"), 1e-3), pytest.param(("--quantize", "int8"), 0.15, marks=multiplies_bytes)]
)
def test_smollm2_knows_the_capital_of_france(flags: tuple[str, ...], tolerance: float):
    """Golden text and log-probabilities of transformers 5.23, which takes 15 s to read the file, on its dequantised weights. The
    engine's layers multiply with its codes, and round activations in int8."""
    with Pod(weights.smollm2(), "--dtype", "float32", "--max-total-tokens", "8192", *flags) as pod, gateway_before(pod) as gateway:
        assert "codes of gguf" in pod.read("/info", wire.Info).arithmetic
        question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        asked = {"messages": question, "temperature": 0, "max_tokens": 12, "logprobs": True}
        answer = gateway.client.post("/v1/chat/completions", json={"model": "SmolLM2-135M-Instruct.Q4_1"} | asked)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The capital of France is Paris.", "stop")
    found = [token["logprob"] for token in choice["logprobs"]["content"]]
    golden = [-1.346306, -0.781406, -0.054257, -0.025301, -0.081836, -0.135320, -0.422717, -0.401393]
    assert found == pytest.approx(golden[: len(found)], abs=tolerance)
    assert len(found) >= 7
