"""Files of a model: weights, downloads, tokenisers, and what is refused of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import CLASSIFIERS, make_checkpoint
from tests.engine.adapters import write_adapter
from tests.processes import Pod
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models import download
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lenvm import GAMMA_FILE
from yardstick_llm.engine.models.loader import fingerprint, load_model
from yardstick_llm.engine.models.source import MAX_PRESET_BYTES, PRESET_FILE, locate, split_revision, tokenizer_files
from yardstick_llm.engine.settings import EngineSettings

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pristine"), "qwen3")


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A whole checkpoint of its own to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "sharded", "qwen3", max_shard_size="60KB")


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of ``model.safetensors``."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def error_of(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert str(directory) not in message, "an error names files, not paths"
    return message


DAMAGES: dict[str, tuple[Callable[[Tensors], object], list[str]]] = {
    "missing": (lambda tensors: tensors.pop(Q_PROJ), [f"lack tensor {Q_PROJ};"]),
    "unexpected": (lambda tensors: tensors.update({"model.layers.0.mlp.experts.weight": torch.ones(2)}), ["0.mlp.experts.weight"]),
    "shape": (lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 32)}), [Q_PROJ, "[64, 32], not [64, 64]"]),
    "dtype": (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].double()}), [Q_PROJ, "F64"]),
}


@pytest.mark.parametrize(("change", "named"), DAMAGES.values(), ids=DAMAGES)
def test_tensors_that_are_refused(
    model: Path, change: Callable[[Tensors], object], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is copied."""
    rewrite(model, change)
    monkeypatch.setattr("yardstick_llm.engine.models.checkpoint.copy", lambda *_: pytest.fail("copied"))
    message = error_of(model)
    assert all(words in message for words in named)


def test_truncated_file(model: Path) -> None:
    content = (model / SINGLE).read_bytes()
    (model / SINGLE).write_bytes(content[:-100])
    assert f"{SINGLE} is damaged or incomplete" in error_of(model)


def test_pickled_weights_are_not_read(model: Path) -> None:
    torch.save(load_file(model / SINGLE), model / "pytorch_model.bin")
    (model / SINGLE).unlink()
    assert "convert it to safetensors" in error_of(model)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name} is missing" in error_of(sharded)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": 1}}', "{"])
def test_damaged_index(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    assert INDEX in error_of(sharded)


def test_index_cannot_lead_outside(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "../secret.safetensors"}}))
    assert "outside the model directory" in error_of(sharded)


def test_missing_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "no config.json" in error_of(model)


def test_obsolete_rotary_buffers_are_ignored(model: Path) -> None:
    before = load_model(model)
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert same_weights(load_model(model), before)


@pytest.mark.parametrize("change", ["both", "head only"])
def test_tied_embedding_under_the_heads_name(tmp_path: Path, change: str) -> None:
    model = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    before = load_model(model)

    def duplicate(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        if change == "head only":
            del tensors[EMBEDDING]

    rewrite(model, duplicate)
    assert same_weights(load_model(model), before)


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing.*check the name and the network, or give a local directory"):
        locate("nobody/nothing")


def test_fingerprint_tells_number_formats_apart(pristine: Path) -> None:
    formats = product((torch.float32, torch.bfloat16), (None, "fp8", "int8"), ("auto", "fp8"))
    assert len({fingerprint(pristine, dtype, quantize, kv_dtype=kept) for dtype, quantize, kept in formats}) == 12
    of_two = fingerprint(pristine, torch.float32, "fp8", 2)
    assert of_two != fingerprint(pristine, torch.float32, "fp8"), "each process has scales for its own part"
    assert fingerprint(pristine, torch.float32, None, 2) == fingerprint(pristine, torch.float32)


def test_fingerprint_tells_models_apart(model: Path, sharded: Path) -> None:
    first = fingerprint(model, torch.float32)
    assert first == fingerprint(model, torch.float32)
    assert fingerprint(sharded, torch.float32) == fingerprint(sharded, torch.float32)
    others = [fingerprint(model, torch.bfloat16), fingerprint(sharded, torch.float32)]
    rewrite(model, lambda tensors: tensors[Q_PROJ][3].mul_(1.001))
    others.append(fingerprint(model, torch.float32))
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    others.append(fingerprint(model, torch.float32))
    assert len({first, *others}) == 5


def test_fingerprint_of_large_files_samples_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.engine.models.loader.HASHED_WHOLE", 1000)
    monkeypatch.setattr("yardstick_llm.engine.models.loader.SAMPLE_BLOCK", 1000)
    before = fingerprint(model, torch.float32)
    rewrite(model, lambda tensors: [tensor.mul_(1.01) for tensor in tensors.values()])
    assert fingerprint(model, torch.float32) != before


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


NEEDED = ["config.json", "model.safetensors", "tokenizer.json", GAMMA_FILE, "1_Pooling/config.json", "yardstick.toml"]
OTHERS = ["pytorch_model.bin", "onnx/model.onnx", "README.md"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "76543210fedcba9876543210fedcba9876543210"
REVISIONS = {"main": COMMIT, "v1": OLD_COMMIT, COMMIT: COMMIT, OLD_COMMIT: OLD_COMMIT}
REVISION = re.compile(r"/api/models/me/value(?:/revision/(.+))?")


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that a download uses, with one repository."""

    root: ClassVar[Path | None] = None
    """A checkpoint to serve; None: files that contain their names."""
    resolved: ClassVar[list[str]] = []
    """Revisions that were asked for, in order."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        commit, _, file = path.removeprefix("/me/value/resolve/").partition("/")
        files = [*NEEDED, *OTHERS] if self.root is None else self._names(self.root)
        if asked := REVISION.fullmatch(path):
            self._resolve(asked[1] or "main", files)
        elif path.startswith("/api/models/me/value/tree/"):
            tree = [{"type": "file", "path": name, "size": len(self._read(name)), "oid": f"{hash(name):x}"} for name in files]
            self._send(200, json.dumps(tree).encode(), "application/json")
        elif file in files and commit in REVISIONS.values():
            self._send(200, self._read(file), "text/plain", ("X-Repo-Commit", commit))
        else:
            self._send(404, b"{}", "application/json", ("X-Error-Code", "RepoNotFound"))

    def _names(self, root: Path) -> list[str]:
        return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]

    def _resolve(self, revision: str, files: list[str]) -> None:
        self.resolved.append(revision)
        if revision not in REVISIONS:
            self._send(404, b"{}", "application/json", ("X-Error-Code", "RevisionNotFound"))
            return
        about = {"id": "me/value", "sha": REVISIONS[revision], "siblings": [{"rfilename": name} for name in files]}
        self._send(200, json.dumps(about).encode(), "application/json", ("X-Repo-Commit", REVISIONS[revision]))

    def _read(self, name: str) -> bytes:
        return name.encode() if self.root is None else (self.root / name).read_bytes()

    def _send(self, status: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        tag = ("ETag", f'"{self.path.rpartition("/")[2]}-{len(body)}"')
        for name, value in (("content-type", kind), ("content-length", str(len(body))), tag, *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(handler: type[Hub] = Hub) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def hub_of(endpoint: str, cache: Path) -> Iterator[None]:
    """Other values of what the hub's library reads from its environment when it is imported."""
    values = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        yield


def located(hub_id: str, endpoint: str, cache: Path, revision: str | None = None) -> Path:
    with hub_of(endpoint, cache):
        return locate(hub_id, revision)


def test_pickled_weights_are_downloaded_where_there_are_no_others(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("config.json", "pytorch_model.bin", "tf_model.h5"):
        (repository / name).write_text("{}")

    class Pickled(Hub):
        root: ClassVar[Path | None] = repository

    with hub(Pickled) as endpoint:
        directory = located("me/value", endpoint, tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "pytorch_model.bin"]


def test_a_model_is_downloaded_with_all_that_is_needed(tmp_path: Path) -> None:
    with hub() as endpoint:
        directory = located("me/value", endpoint, tmp_path)
        assert sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()) == sorted(NEEDED)
        assert (directory / GAMMA_FILE).read_text() == GAMMA_FILE
        with pytest.raises(ModelError, match="There is no directory and no hub model me/nothing"):
            located("me/nothing", endpoint, tmp_path)
    assert located("me/value", endpoint, tmp_path) == directory, "an earlier download is used where there is no network"


def test_one_gguf_file_of_a_repository_is_downloaded(tmp_path: Path) -> None:
    """With all of its parts, and with no other file."""
    names = ["a.gguf", "b.gguf", "sub/c-00001-of-00002.gguf", "sub/c-00002-of-00002.gguf", "config.json"]
    for name in names:
        (tmp_path / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repository" / name).write_text(name)

    class Files(Hub):
        root = tmp_path / "repository"

    with hub(Files) as endpoint:
        for file, expected in {"a.gguf": ["a.gguf"], "sub/c-00001-of-00002.gguf": names[2:4]}.items():
            path = located(f"me/value:{file}", endpoint, tmp_path / file)
            assert path.read_text() == file
            snapshot = path.parents[file.count("/")]
            assert sorted(str(found.relative_to(snapshot)) for found in snapshot.rglob("*.*") if found.is_file()) == expected
        with pytest.raises(ModelError, match=r"me/value has no file other\.gguf"):
            located("me/value:other.gguf", endpoint, tmp_path)
    assert wire.served_name("me/value:sub/c-00001-of-00002.gguf") == "c"
    assert wire.served_name("me/value:a.Q4_1.gguf") == "a.Q4_1"


def test_a_revision_is_pinned(tmp_path: Path) -> None:
    with hub() as endpoint:
        for revision, commit in ((None, COMMIT), ("v1", OLD_COMMIT), (OLD_COMMIT, OLD_COMMIT)):
            assert located("me/value", endpoint, tmp_path, revision).name == commit
        with pytest.raises(ModelError, match="The hub model me/value has no revision v2"):
            located("me/value", endpoint, tmp_path, "v2")
    with pytest.raises(ModelError, match="leave the revision out"):
        locate(tmp_path, "v1")


@pytest.mark.slow
def test_all_processes_of_an_engine_load_one_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch may move while they start, so it is looked up once."""

    class Checkpoint(Hub):
        root = make_checkpoint(tmp_path / "checkpoint", "qwen3", num_hidden_layers=1)
        resolved: ClassVar[list[str]] = []

    with hub(Checkpoint) as endpoint:
        for name, value in {"ENDPOINT": endpoint, "HOME": str(tmp_path), "HUB_DISABLE_XET": "1", "HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(f"HF_{name}", value)
        arguments = ["--revision", "v1", "--tensor-parallel", "2", "--device", "cpu", "--max-total-tokens", "512", "--threads", "1"]
        pod = Pod("me/value", *arguments)
        try:
            info = pod.wait_ready().read("/info", wire.Info)
            assert "yardstick_engine_slots 512.0" in pod.client.get("/metrics").text, "metrics before the first step"
        finally:
            pod.close()
    assert info.model == "value"
    assert Checkpoint.resolved == ["v1"]


@pytest.mark.slow
def test_an_engine_loads_an_adapter_of_a_pinned_revision(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=1)

    class Adapter(Hub):
        root = write_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base))
        resolved: ClassVar[list[str]] = []

    with hub(Adapter) as endpoint, hub_of(endpoint, tmp_path):
        loop = build_loop(EngineSettings(model=str(base), name="t", max_total_tokens=512, lora=["sql=me/value@v1"]))
    assert [adapter.name for adapter in loop.adapters.description.adapters] == ["sql"]
    assert Adapter.resolved == ["v1"]


@pytest.mark.parametrize("name", ["a/b/c", "../x"])
def test_what_is_no_hub_id_is_looked_for_here_only(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="is not a directory"):
        locate(name)


@pytest.mark.slow
def test_engines_wait_until_another_process_has_downloaded_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the init containers of pods wait for a Job. The snapshot's directory alone does not end the wait, and the files of an
    adapter are complete on their own: its model's files are others."""
    monkeypatch.setattr(download, "POLL_SECONDS", 0.05)
    adapter = ["adapter_config.json", "adapter_model.safetensors"]
    for name in (*adapter, "model.safetensors"):
        (tmp_path / "repository").mkdir(exist_ok=True)
        (tmp_path / "repository" / name).write_text(name)

    class Files(Hub):
        root = tmp_path / "repository"

    def said(code: int, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["download", *arguments])
        with hub_of(endpoint, tmp_path):
            assert download.main() == code
        return capsys.readouterr().err

    snapshot = tmp_path / "hub/models--me--value/snapshots" / OLD_COMMIT
    snapshot.mkdir(parents=True)
    command = [sys.executable, "-m", download.__name__, "--wait=60", "me/value@v1", str(tmp_path), "--lora=sql=me/value@v1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    with hub(Files) as endpoint, subprocess.Popen(command, env=environment | {"HF_HOME": str(tmp_path)}) as waits:
        assert "me/value@v1 was not downloaded within 0.1 s" in said(1, "--wait=0.1", "me/value@v1")
        said(0, "--lora=sql=me/value@v1", f"--lora=here={tmp_path}")
        assert sorted(file.name for file in snapshot.iterdir()) == adapter
        assert "me/value@v1 was not downloaded" in said(1, "--wait=0.1", "me/value@v1")
        assert waits.poll() is None
        said(0, "me/value@v1")
        assert waits.wait(60) == 0
        missing = "yardstick_llm.engine.models.download: There is no directory and no hub model me/nothing"
        assert missing in said(1, "me/nothing")
    assert located("me/value", "http://127.0.0.1:1", tmp_path, "v1") == snapshot


def test_a_directory_with_an_at_sign_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / "ranker@home").mkdir()
    assert split_revision(str(tmp_path / "ranker@home")) == (str(tmp_path / "ranker@home"), None)
    assert split_revision("org/ranker@v1") == ("org/ranker", "v1")
    assert split_revision("org/ranker") == ("org/ranker", None)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3", model_class=CLASSIFIERS["qwen3"], num_hidden_layers=1)


def test_architecture_and_no_preset(classifier: Path) -> None:
    files = tokenizer_files(classifier)
    assert (files.architecture, files.preset) == ("Qwen3ForSequenceClassification", None)
    assert files.special_tokens["eos_token"] == "<|im_end|>"


def test_a_preset_is_passed_on_as_it_is(classifier: Path) -> None:
    text = "# ä\n" + "x" * (MAX_PRESET_BYTES - 5)
    (classifier / PRESET_FILE).write_bytes(text.encode())
    assert tokenizer_files(classifier).preset == text


@pytest.mark.parametrize(
    ("content", "named"), [(b"x" * (MAX_PRESET_BYTES + 1), "has more than 65536 bytes; shorten it."), (b"\xff", "is not UTF-8")]
)
def test_a_preset_that_is_refused(classifier: Path, content: bytes, named: str) -> None:
    (classifier / PRESET_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=f"^{PRESET_FILE} in the model directory {named}"):
        tokenizer_files(classifier)
