"""Saves models of every kind as the installed sentence-transformers does, and prints what it makes of texts, as JSON by model.

Arguments: a folder with a BERT tokeniser, a folder for the models, and texts and pairs as JSON.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
)
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

warnings.simplefilter("ignore")
torch.manual_seed(0)
SIZE, CONTEXT = 32, 64
identity, gelu = torch.nn.Identity(), torch.nn.GELU()


def base(kind, name, **labels):
    shape = {"hidden_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, initializer_range=0.5, **shape, **labels)
    kind(config).save_pretrained(target / name)
    tokenizer.save_pretrained(target / name)
    return str(target / name)


def saved(model, name):
    """Save a model and load it again."""
    model.save(str(target / name))
    return type(model)(str(target / name), device="cpu")


source, target, given = sys.argv[1:]
tokenizer, target, given = AutoTokenizer.from_pretrained(source), Path(target), json.loads(given)
texts, pairs = given["texts"], given["pairs"]
tokenizer.model_max_length = CONTEXT
tokenizer.add_tokens(["[Q] ", "[D] "])
body, classes, masked = base(BertModel, "b"), base(BertForSequenceClassification, "c", num_labels=1), base(BertForMaskedLM, "m")
found = {}

chain = [Pooling(SIZE, "mean"), Dense(SIZE, 16, use_residual=True), Dense(16, 16, use_residual=True), LayerNorm(16), Normalize()]
model = SentenceTransformer(modules=[Transformer(body), *chain], prompts={"query": "find: "}, default_prompt_name="query")
model.max_seq_length = 20
found["embedding"] = saved(model, "embedding").encode(texts).tolist()

# As releases before 2 wrote them: several modes of pooling, and the model in a folder of its own.
saved(SentenceTransformer(modules=[Transformer(body), Pooling(SIZE, ("cls", "mean"))]), "folder")
(target / "folder" / "0_Transformer").mkdir()
for path in [path for path in (target / "folder").iterdir() if path.is_file() and path.name != "modules.json"]:
    path.rename(target / "folder" / "0_Transformer" / path.name)
modules = json.loads((target / "folder" / "modules.json").read_text())
(target / "folder" / "modules.json").write_text(json.dumps([modules[0] | {"path": "0_Transformer"}, *modules[1:]]))
flags = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
(target / "folder" / "1_Pooling" / "config.json").write_text(json.dumps(flags))
found["folder"] = SentenceTransformer(str(target / "folder"), device="cpu").encode(texts, normalize_embeddings=True).tolist()

table = torch.randn(len(tokenizer), SIZE, generator=torch.Generator().manual_seed(2)).numpy()
model = saved(SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=table), Normalize()]), "static")
found["static"] = model.encode(texts).tolist()

model = CrossEncoder(classes, max_length=24, activation_fn=identity, prompts={"web": "On the web: "}, default_prompt_name="web")
found["cross-encoder"] = saved(model, "cross-encoder").predict(pairs).tolist()

score = Dense(SIZE, 1, activation_function=identity, module_output_name="scores")
chain = [Pooling(SIZE, "cls"), Dense(SIZE, SIZE, activation_function=gelu), LayerNorm(SIZE), score]
found["modules"] = saved(CrossEncoder(modules=[Transformer(body), *chain]), "modules").predict(pairs).tolist()

# Templates that take contents as texts and as parts; the second one has a variable of its own.
by_role = """{% for message in messages %}{{ message.role + ": " + CONTENT + " " }}{% endfor %}{% if add_generation_prompt %}
{{ "relevant? " + (hint or "") }}{% endif %}"""
shape = {"hidden_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.5, **shape)
for name, content, variables in (
    ("causal", "message.content", {}),
    ("causal-parts", "message.content[0].text", {"hint": "yes or no"}),
):
    LlamaForCausalLM(config).save_pretrained(target / "l")
    chatting = AutoTokenizer.from_pretrained(source, model_max_length=256)
    chatting.chat_template = by_role.replace("CONTENT", content)
    chatting.save_pretrained(target / "l")
    arguments = {"chat_template": {"add_generation_prompt": True, **variables}}
    body_of_text = Transformer(str(target / "l"), transformer_task="text-generation", processing_kwargs=arguments)
    ids = tokenizer.convert_tokens_to_ids(["yes", "no"])
    chain = [body_of_text, LogitScore(*ids) if name == "causal" else LogitScore(ids[0])]
    model = CrossEncoder(modules=chain, prompts={"web": "On the web."}, default_prompt_name="web")
    found[name] = saved(model, name).predict(pairs).tolist()

found["sparse"] = saved(SparseEncoder(masked), "sparse").encode(texts).to_dense().tolist()

# As OpenSearch's models are published: a table for queries, and the model of documents in the folder itself.
table = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(4)).sub(0.2).relu()
queries, documents = [SparseStaticEmbedding(tokenizer, table)], [Transformer(masked, transformer_task="fill-mask"), SpladePooling()]
documents[1].activation_function = "log1p_relu"
model = saved(SparseEncoder(modules=[Router.for_query_document(queries, documents)]), "router")
found["router"] = model.encode_document(texts).to_dense().tolist()
of_queries = model.encode_query(texts).to_dense().tolist()
inner = next((target / "router").glob("document_0_*"))
for path in inner.iterdir():
    path.rename(target / "router" / path.name)
router = json.loads((target / "router" / "router_config.json").read_text().replace(inner.name, ""))
(target / "router" / "router_config.json").write_text(json.dumps(router))

projection = Dense(SIZE, 16, bias=False, activation_function=identity, module_input_name="token_embeddings")
expanded = Transformer(body, query_expansion={"strategy": "fixed", "attend": False, "length": 16}, document_length=12)
chain = [expanded, projection, MultiVectorMask(skiplist_words=[".", "?"]), Normalize(module_input_name="token_embeddings")]
models = {"vectors": saved(MultiVectorEncoder(modules=chain, prompts={"query": "[Q] ", "document": "[D] "}), "vectors")}

stanford = target / "stanford"
base(BertModel, "stanford")
config = json.loads((stanford / "config.json").read_text())
(stanford / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
weights = {f"bert.{name}": tensor for name, tensor in load_file(stanford / "model.safetensors").items()}
save_file({**weights, "linear.weight": projection.linear.weight.detach()}, stanford / "model.safetensors", {"format": "pt"})
(stanford / "artifact.metadata").write_text(json.dumps({"query_maxlen": 16, "doc_maxlen": 12, "attend_to_mask_tokens": False}))
models["stanford"] = MultiVectorEncoder(str(stanford), device="cpu")
for name, model in models.items():
    queries, documents = model.encode_query(texts), model.encode_document(texts)
    found[name] = [[torch.as_tensor(each).tolist() for each in rows] for rows in (queries, documents)]
print(json.dumps(found | {"router queries": of_queries}))
