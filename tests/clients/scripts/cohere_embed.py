import json
import sys

import cohere

url, model = sys.argv[1:]  # http://127.0.0.1:8000 qwen3-embedding
client = cohere.ClientV2(api_key="none", base_url=url)
answer = client.embed(
    model=model,
    texts=["red running shoes", "blue table"],
    input_type="search_document",
    embedding_types=["float", "int8"],
)
parts = client.embed(
    model=model,
    inputs=[{"content": [{"type": "text", "text": text}]} for text in ("red running shoes", "blue table")],
    input_type="search_document",
)
older = cohere.Client(api_key="none", base_url=url).embed(
    model=model,
    texts=["red running shoes", "blue table"],
    input_type="search_document",
)
print(json.dumps([answer.embeddings.float_, answer.embeddings.int8, parts.embeddings.float_, older.embeddings]))
