"""A chat completion with the OpenAI SDK: ``python chat.py [URL]``."""

from __future__ import annotations

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("YARDSTICK_API_KEY", "none"))
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe: red running shoes"}],
    max_completion_tokens=200,
    seed=7,
)
print(answer.choices[0].message.content)
print(answer.choices[0].finish_reason, answer.usage.completion_tokens if answer.usage else None)
