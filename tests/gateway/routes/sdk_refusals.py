"""Requests that no repetition changes, through the OpenAI SDK: ``python sdk_refusals.py BASE_URL REQUESTS``.

``REQUESTS``: a JSON list of API key, method, path and body. Prints the SDK's version, and the status code of each answer, as JSON.
"""

from __future__ import annotations

import json
import sys

import openai


def main(url: str, requests: str) -> None:
    statuses = []
    for key, method, path, body in json.loads(requests):
        client = openai.OpenAI(base_url=url, api_key=key)
        try:
            getattr(client, method)(path, cast_to=object, body=body)
            statuses.append(200)
        except openai.APIStatusError as error:
            statuses.append(error.status_code)
    print(json.dumps({"version": openai.__version__, "statuses": statuses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
