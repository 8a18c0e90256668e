import json
import sys

import cohere

url, model = sys.argv[1:]  # http://127.0.0.1:8000 qwen3-embedding
client = cohere.ClientV2(api_key="none", base_url=url)
answer = client.embed(
    model=model,
    texts=["red running shoes", "blue table"],
    input_type="search_document",
    embedding_types=["float"],
)
older = cohere.Client(api_key="none", base_url=url).embed(
    model=model,
    texts=["red running shoes", "blue table"],
    input_type="search_document",
)
print(json.dumps([answer.embeddings.float_, older.embeddings]))
