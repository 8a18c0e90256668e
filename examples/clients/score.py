"""Score a list of items and sort it: ``python score.py [URL]``."""

from __future__ import annotations

import os
import sys

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
items = ["blue running shoes", "crimson jogging sneakers", "green tent"]
request = {
    "query": "Query: red running shoes\nItem: ",
    "items": [f"{item}\nRelevant:" for item in items],
    "labels": [" Yes", " No"],
    "apply_softmax": True,
}
headers = {"authorization": f"Bearer {os.environ.get('YARDSTICK_API_KEY', 'none')}"}
response = httpx.post(f"{url}/v1/score", json=request, headers=headers, timeout=60)
response.raise_for_status()
scores = response.json()["scores"]  # for each item, in order, a list with one probability for each label
for item, (yes, _) in sorted(zip(items, scores, strict=True), key=lambda pair: pair[1], reverse=True):
    print(f"{yes:.3f} {item}")
