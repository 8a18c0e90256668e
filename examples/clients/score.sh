#!/usr/bin/env bash
# Score a list of items with curl: score.sh [URL]
set -euo pipefail

curl --fail --silent --show-error "${1:-http://127.0.0.1:8000}/v1/score" \
  -H 'content-type: application/json' -H "authorization: Bearer ${YARDSTICK_API_KEY:-none}" -d '{
    "query": "Query: red running shoes\nItem: ",
    "items": ["blue running shoes\nRelevant:", "crimson jogging sneakers\nRelevant:"],
    "labels": [" Yes", " No"],
    "apply_softmax": true
  }'
