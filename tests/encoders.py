"""Directories of encoders for tests: random weights written by transformers, and the files of sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints import HEADLESS, VOCAB_SIZE, make_checkpoint, randomize, write_pooling, write_tokenizer

Kind = Literal["embed", "classes", "masked"]
SUFFIXES: dict[Kind, str] = {"embed": "Model", "classes": "ForSequenceClassification", "masked": "ForMaskedLM"}
_NAMES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm_roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "electra": "Electra",
    "nomic": "NomicBert",
    "gte": "Gte",
    "deberta": "DebertaV2",
    "eurobert": "EuroBert",
    "albert": "Albert",
    "ernie": "Ernie",
    "jina_v3": "JinaEmbeddingsV3",
}
"""First parts of the names of transformers' classes."""
TYPED = ("bert", "electra", "nomic", "gte", "albert", "ernie")
"""Families with several token types."""
WITHOUT_MASKED = ("nomic", "electra", "deberta", "eurobert", "albert")
CONTEXT = 128
CLASSES = 3
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "roberta": {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm_roberta": {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "mpnet": {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 48},
    "ernie": {"use_task_id": True, "task_type_vocab_size": 3},
    "distilbert": {"n_layers": 3, "n_heads": 4, "dim": 64, "hidden_dim": 96},
    "modernbert": {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2, "norm_bias": True, "classifier_bias": True},
    "gte": {"type_vocab_size": 2},
    "jina_v3": {"type_vocab_size": 1, "bos_token_id": 0, "pad_token_id": 1},
    "eurobert": {"num_key_value_heads": 2, "mask_token_id": 3},
    "deberta": {
        "relative_attention": True,
        "position_biased_input": False,
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "norm_rel_ebd": "layer_norm",
        "max_relative_positions": -1,
        "position_buckets": 16,
    },
}


def make_encoder(directory: Path, family: str, kind: Kind = "embed", *, pooling: str = "mean_tokens", **overrides: Any) -> Path:
    """Write a model of ``family`` with random weights, a tokeniser and, to embed, a pooling module. Returns ``directory``."""
    name = _NAMES[family]
    config = getattr(transformers, f"{name}Config")
    labels = {"num_labels": CLASSES} if kind == "classes" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name + SUFFIXES[kind])(config(**(_SHAPE | _OVERRIDES.get(family, {}) | labels | overrides)))
        randomize(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return write_pooling(directory, pooling) if kind == "embed" else directory


def make_whole(directory: Path, family: str) -> Path:
    """Write a model that embeds and whose tokens all attend to each other: an encoder, or the decoder ``qwen3``. Returns
    ``directory``."""
    if family != "qwen3":
        return make_encoder(directory, family, num_hidden_layers=2)
    write_pooling(make_checkpoint(directory, family, model_class=HEADLESS[family], num_hidden_layers=2), "mean_tokens")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_causal": False}))
    return directory


TASKS = ("retrieval.query", "retrieval.passage", "text-matching")


def make_jina_v3(directory: Path) -> list[Path]:
    """Write a jina-embeddings-v3 as published, and folders of the weights of each task, merged, and of no task for transformers,
    which reads and writes the published names."""
    plain = make_encoder(directory / "none", "jina_v3", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    stored, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(5)
    published, *merged = dict[str, torch.Tensor](), *(dict(stored) for _ in TASKS)
    for name, tensor in stored.items():
        if name.endswith("bias") or "norm" in name or "emb_ln" in name:
            published[f"roberta.{name}"] = tensor
            continue
        # matrices of an embedding are those of its transpose
        a, b = (torch.randn(len(TASKS), *shape, generator=generator) / 4 for shape in ((len(tensor), 4), (4, tensor.shape[1])))
        for own, delta in zip(merged, a @ b / 4, strict=True):
            own[name] = tensor + delta
        prefix = f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        published |= {f"{prefix}.original": tensor, f"{prefix}.0.lora_A": a, f"{prefix}.0.lora_B": b}
        if "embeddings" not in name:
            published |= {f"{prefix}.0.lora_A": b, f"{prefix}.0.lora_B": a}
    folders = [Path(shutil.copytree(plain, directory / name)) for name in ("published", *TASKS)]
    for each, tensors in zip(folders, (published, *merged), strict=True):
        save_file(tensors, each / "model.safetensors", {"format": "pt"})
    own = {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"}
    config: dict[str, Any] = {"architectures": ["XLMRobertaModel"], "model_type": None, "auto_map": own, "rope_parameters": None}
    config |= {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    config |= {"lora_adaptations": TASKS, "lora_rank": 4, "lora_alpha": 1}
    config["task_instructions"] = {"retrieval.query": "find: ", "retrieval.passage": "", "text-matching": ""}
    path = folders[0] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    modules = json.loads((folders[0] / "modules.json").read_text())
    modules[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
    (folders[0] / "modules.json").write_text(json.dumps(modules))
    return [*folders, plain]


def load_reference(directory: Path, family: str, kind: Kind) -> torch.nn.Module:
    return getattr(transformers, _NAMES[family] + SUFFIXES[kind]).from_pretrained(directory, dtype=torch.float32).eval()


def add_module(directory: Path, kind: str, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> Path:
    """Append a module to a sentence-transformers directory. Returns its folder."""
    modules = json.loads((directory / "modules.json").read_text())
    folder = directory / f"{len(modules)}_{kind}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        torch.save(weights, folder / "pytorch_model.bin")
    entry = {"idx": len(modules), "name": str(len(modules)), "path": folder.name, "type": f"sentence_transformers.models.{kind}"}
    (directory / "modules.json").write_text(json.dumps([*modules, entry]))
    return folder
