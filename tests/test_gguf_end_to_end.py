"""GGUF files behind a real gateway and a real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import weights
from tests.checkpoints import make_checkpoint
from tests.gguf_files import SHAPE, write_gguf
from tests.processes import Pod, Program
from yardstick_llm.engine import wire

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"


@contextmanager
def serving(path: Path, *arguments: str) -> Iterator[tuple[Pod, Program]]:
    pod = Pod(path, *arguments)
    gateway = None
    try:
        gateway = Program("gateway", "--engine", pod.wait_ready().url)
        yield pod, gateway.wait_ready()
    finally:
        for program in (gateway, pod):
            if program is not None:
                program.close()


@pytest.mark.slow
def test_a_small_file_is_served_by_its_name(tmp_path: Path):
    """Scores are those of transformers; a chat template that does not end is an error in seconds, and the gateway serves on."""
    path = tmp_path / "Small-Q8_0.gguf"
    template = {"tokenizer.chat_template": gguf.GGUFValue(ENDLESS, gguf.GGUFValueType.STRING)}
    directory = make_checkpoint(tmp_path / "checkpoint", "qwen3", **SHAPE)
    reference = write_gguf(directory, path, "Q8_0", lambda writer: writer.kv_data[0].update(template))
    with serving(path) as (pod, gateway):
        assert pod.read("/info", wire.Info).model == "Small-Q8_0"
        fields = {"model": "Small-Q8_0", "query": [1, 5, 9], "items": [[7, 8], [30]], "label_token_ids": [40, 41]}
        answer = gateway.client.post("/v1/score", json=fields)
        assert answer.status_code == 200, answer.text
        with torch.no_grad():
            for item, scores in zip(fields["items"], answer.json()["scores"], strict=True):
                expected = reference(torch.tensor([fields["query"] + item])).logits[0, -1].softmax(-1)[[40, 41]]
                assert scores == pytest.approx(expected.tolist(), abs=1e-5)
        started = time.monotonic()
        chat = gateway.client.post("/v1/chat/completions", json={"model": "Small-Q8_0", "messages": QUESTION})
        assert chat.status_code == 400, chat.text
        assert time.monotonic() - started < 45
        assert gateway.client.post("/v1/score", json=fields).json()["scores"] == answer.json()["scores"]


@pytest.fixture(scope="module")
@torch.inference_mode()
def expected() -> tuple[str, list[float]]:
    """Greedy text of SmolLM2 in transformers, on the dequantised file, and the log-probability of each token."""
    path = weights.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = model.generate(
        ids, attention_mask=ids**0, max_new_tokens=30, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    written = output.sequences[0, ids.shape[1] :]
    logprobs = [row[0].log_softmax(-1)[token].item() for row, token in zip(output.logits, written, strict=True)]
    return tokenizer.decode(written, skip_special_tokens=True), logprobs


@pytest.mark.slow
@pytest.mark.parametrize("dequantize", ["on", "off"])
def test_smollm2_knows_the_capital_of_france(expected: tuple[str, list[float]], dequantize: str):
    """Text and log-probabilities are those of transformers, also where layers multiply with the file's codes."""
    with serving(weights.smollm2(), "--dtype", "float32", "--dequantize", dequantize) as (pod, gateway):
        words = {"on": "weights of gguf dequantised", "off": "codes of gguf"}[dequantize]
        assert words in pod.read("/info", wire.Info).arithmetic
        body = {"model": "SmolLM2-135M-Instruct.Q4_1", "messages": QUESTION, "temperature": 0, "max_tokens": 30, "logprobs": True}
        answer = gateway.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
    text, logprobs = expected
    assert "Paris" in choice["message"]["content"]
    assert choice["message"]["content"] == text
    found = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert found == pytest.approx(logprobs[: len(found)], abs=1e-3)
