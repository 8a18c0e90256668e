"""A streamed chat completion with log-probabilities: ``python stream.py [URL]``."""

from __future__ import annotations

import math
import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("YARDSTICK_API_KEY", "none"))
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe: red running shoes"}],
    max_completion_tokens=20,
    temperature=0,
    logprobs=True,
    top_logprobs=2,
    stream=True,
)
for chunk in stream:
    for choice in chunk.choices:
        for token in (choice.logprobs and choice.logprobs.content) or []:
            others = {top.token: round(math.exp(top.logprob), 3) for top in token.top_logprobs}
            print(f"{token.token!r} {math.exp(token.logprob):.3f} of {others}", flush=True)
