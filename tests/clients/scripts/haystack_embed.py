import json
import sys

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)

url, _ = sys.argv[1:]  # http://127.0.0.1:8000
options = {"api_type": "text_embeddings_inference", "api_params": {"url": url}, "token": Secret.from_token("none")}
query = HuggingFaceAPITextEmbedder(**options).run(text="red running shoes")["embedding"]
(document,) = HuggingFaceAPIDocumentEmbedder(**options).run(documents=[Document(content="blue table")])["documents"]
print(json.dumps([query, document.embedding]))
