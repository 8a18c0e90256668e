import json
import sys

from huggingface_hub import InferenceClient

url, _ = sys.argv[1:]  # http://127.0.0.1:8000
client = InferenceClient(model=url, token="none")
vectors = client.feature_extraction(["red running shoes", "blue table"]).tolist()
scores = client.sentence_similarity("red running shoes", ["red running shoes", "blue table"])
print(json.dumps([vectors, scores]))
