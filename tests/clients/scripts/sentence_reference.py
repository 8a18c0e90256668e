"""What sentence-transformers makes of texts, as JSON. Argument: a list of calls, each with a folder and what to compute."""

import json
import sys
import warnings

from sentence_transformers import CrossEncoder, SentenceTransformer

warnings.simplefilter("ignore")
answers = []
for call in json.loads(sys.argv[1]):
    if "pairs" in call:
        answers.append(CrossEncoder(call["folder"], device="cpu").predict(call["pairs"]).tolist())
        continue
    model = SentenceTransformer(call["folder"], device="cpu")
    options = {name: call[name] for name in ("prompt", "prompt_name", "batch_size") if name in call}
    embeddings = model.encode(call["texts"], **options)
    answers.append([embeddings.tolist(), model.similarity(embeddings, embeddings).tolist()])
print(json.dumps(answers))
