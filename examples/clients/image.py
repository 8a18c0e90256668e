"""A question about an image with the OpenAI SDK: ``python image.py FILE [URL]``."""

from __future__ import annotations

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

file = Path(sys.argv[1])
url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
kind = mimetypes.guess_type(file.name)[0] or "image/png"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("YARDSTICK_API_KEY", "none"))
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"}},
                {"type": "text", "text": "What is in this picture?"},
            ],
        }
    ],
    max_completion_tokens=100,
)
print(answer.choices[0].message.content)
print(answer.usage.prompt_tokens if answer.usage else None)
