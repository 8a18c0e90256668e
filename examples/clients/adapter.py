"""Train a LoRA adapter elsewhere, load it into a running server, and ask with it: ``python adapter.py URL DIRECTORY [NAME]``.

Any trainer that saves PEFT's format will do. The whole of a training run with PEFT is::

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"))
    ...  # train it, with Trainer, TRL or a loop of your own
    model.save_pretrained("/adapters/support")  # below the engines' --lora-root

DIRECTORY is that directory as the engines see it. Loading needs a key with ``admin``, or a server without keys.
"""

from __future__ import annotations

import os
import sys

import httpx

url, directory = sys.argv[1], sys.argv[2]
name = sys.argv[3] if len(sys.argv) > 3 else "support"
headers = {"authorization": f"Bearer {os.environ.get('YARDSTICK_API_KEY', 'none')}"}
with httpx.Client(base_url=url, headers=headers, timeout=300) as client:
    loaded = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": directory, "load_inplace": True})
    loaded.raise_for_status()
    adapter = f"{loaded.json()['parent']}:{name}"
    print(f"{adapter} is on {loaded.json()['engines']} engines")
    for model in (loaded.json()["parent"], adapter):  # the base and the adapter share steps
        body = {"model": model, "query": "Is it red? ", "items": ["red shoes", "an oak table"], "labels": [" Yes", " No"]}
        answer = client.post("/v1/score", json=body).raise_for_status().json()
        print(answer["model"], answer["scores"])
