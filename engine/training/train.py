"""Trains a length model: a small model of the same tokeniser learns v = 1 − γⁿ after each token of sampled answers.

Target and checkpoint: "Length Value Model", arXiv 2604.27039, with the sign of its public code. Unlike there, an answer that was
cut does not count as ended: its states near the cut are left out.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from safetensors.torch import save_file
from torch import Tensor, nn

from yardstick_llm.engine.models import checkpoint
from yardstick_llm.engine.models.checkpoint import ADAPTER, SINGLE, VALUE_HEAD
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError, is_gguf, read_json
from yardstick_llm.engine.models.formats.published import KEYS as METHOD_KEYS
from yardstick_llm.engine.models.formats.published import method_of, read_stored
from yardstick_llm.engine.models.gguf.config import configuration
from yardstick_llm.engine.models.lenvm import (
    DOWN,
    GAMMA_FILE,
    HEAD_PREFIX,
    UP,
    LenVM,
    check_servable,
    facts_of,
    first_layers,
    is_adapter,
    load_lenvm,
    tokenizer_digest,
    weights_of,
)
from yardstick_llm.engine.models.loader import HEAD, decoder_views, fill, fingerprint
from yardstick_llm.engine.models.modules import PROJECTIONS, Linear, RMSNorm, refuse_experts
from yardstick_llm.engine.models.registry import family_of
from yardstick_llm.engine.models.source import locate, tokenizer_files
from yardstick_llm.engine.settings import DEVICES, Count, Share, choices, unset
from yardstick_llm.engine.training.data import (
    Dataset,
    check_tokenizer,
    gamma_for,
    learned,
    length_quantile,
    pack,
    passes,
    predict,
    raw_values,
    read_dataset,
    read_tokens,
)
from yardstick_llm.engine.training.evaluate import judge, spellings_in, write_json
from yardstick_llm.engine.training.parallel import Group, is_member, join
from yardstick_llm.kernels.linear import linear

STATE = "training.pt"
MOST_CUT = 0.5
"""Share of cut answers above which training refuses."""
PASS_TOKENS = {"cpu": 4096, "cuda": 16_384}
CLIP = 1.0
BETAS, EPSILON = (0.9, 0.95), 1e-8
HUBER_DELTA = 0.1
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OF_LAYERS = ("layer_types", "no_rope_layers")
"""Keys of a configuration with an entry for each layer."""
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the training."""

    data: str
    """Folder of ``yardstick lenvm sample``."""
    init: str
    """A model of the same tokeniser to begin with, a directory, a hub id or a GGUF file: small, because it runs beside the other
    one."""
    out: str
    """Folder of the length model."""
    layers: Annotated[Count | None, unset("all")] = None
    """Take only the first layers of ``init``, and its final norm: a length model for a part of its cost."""
    method: Annotated[str, choices("full", "lora", "adapter")] = "full"
    """Train all weights, or only small additions (LoRA), which need less memory. ``lora`` merges them at the end. ``adapter``
    writes them alone, a few megabytes; such a length model is served with the model of ``init``."""
    lora_rank: Count = 16
    """Rank of the additions."""
    loss: Annotated[str, choices("bce", "huber")] = "bce"
    """Cross entropy of the value, or Huber's loss of its difference."""
    gamma: Annotated[Share | None, unset("1 − gamma^L99 = 0.99")] = None
    """The discount. L99 is the length that 99 % of the answers do not exceed."""
    lr: Annotated[float, Meta(gt=0, le=1)] = 2e-5
    """Largest learning rate. Small models take larger ones: 1e-3 for 1M parameters."""
    warm_up: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Share of the steps in which the learning rate rises; then it falls along a cosine."""
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Decoupled weight decay."""
    epochs: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Passes over the data."""
    tokens_per_step: Count = 65_536
    """Tokens of prompts and answers that an update learns from."""
    tokens_per_pass: Annotated[Count | None, unset("16,384 on a GPU, 4,096 on a CPU")] = None
    """Tokens of a forward pass. Fewer need less memory; the result is the same."""
    margin: Share = 0.05
    """Largest error of a target that a cut may cause. States of cut answers with a larger one are left out."""
    checks: Count = 20
    """Times that the validation loss is measured. The best state is kept."""
    save_minutes: Annotated[float, Meta(gt=0, le=1e6)] = 10.0
    """Longest time between two savings of the state."""
    seed: int = 0
    """Of the head and of the order of texts."""
    processes: Annotated[Count | None, unset("one for each GPU, 1 on a CPU")] = None
    """Processes that share the texts of each step, on this machine."""
    device: Annotated[str | None, choices(*DEVICES, unset="a GPU where there is one")] = None
    """Device of the model: bfloat16 with float32 master weights on a GPU, float32 on a CPU."""


class Adapted(nn.Module):
    """A frozen projection and its low-rank addition.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; with alpha = rank.
    """

    def __init__(self, projection: Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.projection = projection
        weight = projection.weight
        noise = torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        self.down = nn.Parameter(noise.to(weight))
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        return self.projection(x) + linear(linear(x, self.down), self.up)  # type: ignore[no-any-return]

    @torch.no_grad()
    def merged(self) -> Linear:
        """The projection with the addition in its weight."""
        self.projection.weight.add_((self.up.float() @ self.down.float()).to(self.projection.weight))
        return self.projection


def load_init(directory: Path, dtype: torch.dtype, seed: int, layers: int | None = None) -> LenVM:
    """Load a model with a new value head, or a length model with its own; ``layers``: the first ones, None for all. Raises
    :class:`ModelError`."""
    config = first_layers(load_config(directory), layers)
    check_servable(config)
    refuse_experts(config, "Training of a length model")
    if config.vision is not None:
        raise ModelError(f"Training of a length model does not support images, which this {config.architecture} reads.")
    stored = read_stored(directory)
    if (directory / VALUE_HEAD).exists() or any(name.startswith(HEAD_PREFIX) for name in stored):
        return load_lenvm(directory, dtype, layers=layers).train()
    stored = weights_of(stored, layers)
    model = LenVM(config, dtype)
    checkpoint.check(stored, decoder_views(model.decoder, stored), [HEAD, "score.weight"], family_of(config.architecture).unread)
    fill(model.decoder, stored)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for projection in (model.head.fc, model.head.summary):
            noise = torch.randn(projection.weight.shape, generator=generator) * config.hidden_size**-0.5
            projection.weight.copy_(noise)
            projection.bias.zero_()
    return model.train()


def trainable(model: LenVM, method: str, rank: int, seed: int) -> dict[str, nn.Parameter]:
    """Prepare a model for a method, and return the parameters that it trains, by name."""
    if method != "full":
        model.decoder.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed + 1)
        for layer in model.decoder.layers:
            for name in PROJECTIONS:
                layer.set_submodule(name, Adapted(layer.get_submodule(name), rank, generator))  # type: ignore[arg-type]
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def state_loss(z: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Return the loss of each state. z: raw values; targets: 1 − γⁿ, [states] float32 both."""
    if kind == "bce":
        return nn.functional.binary_cross_entropy_with_logits(z, targets, reduction="none")
    return nn.functional.huber_loss(z.sigmoid(), targets, reduction="none", delta=HUBER_DELTA)


@dataclass
class Progress:
    """What a training has done; with its master weights and its optimiser all that it needs to go on."""

    step: int = 0
    best_loss: float = math.inf
    best: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Owns the model, the master weights, the optimiser and the order of the texts."""

    def __init__(
        self,
        model: LenVM,
        dataset: Dataset,
        gamma: float,
        settings: TrainSettings,
        device: torch.device,
        group: Group = Group(),  # noqa: B008 - it is immutable
    ) -> None:
        self.model = model.to(device)
        self.group = group
        self.settings = settings
        self.gamma = gamma
        self.device = device
        self.texts = dataset.texts("train")
        self.checked = dataset.texts("validation")
        self.most = settings.tokens_per_pass or PASS_TOKENS[device.type]
        self.masks = [learned(text, gamma, settings.margin) for text in self.texts]
        self.sizes = [*map(read_tokens, self.texts, self.masks)]
        """Tokens that are read of each text; 0 if none of its states has a target."""
        if not any(self.sizes):
            raise ModelError("No state has a target: all answers were cut too early. Sample with a larger --max-tokens.")
        self.parameters = trainable(model, settings.method, settings.lora_rank, settings.seed)
        wide = all(parameter.dtype == torch.float32 for parameter in self.parameters.values())
        self.masters = self.parameters if wide else {name: each.detach().float() for name, each in self.parameters.items()}
        """float32, updated by the optimiser; the parameters are their copies in the model's dtype."""
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), settings.lr, BETAS, EPSILON, weight_decay=settings.weight_decay, foreach=False
        )
        self.steps = self._plan()
        self.progress = Progress()

    def _plan(self) -> list[list[int]]:
        """The texts of each step, in a new order in each epoch."""
        steps: list[list[int]] = []
        for epoch in range(self.settings.epochs):
            order = np.random.default_rng([self.settings.seed, epoch]).permutation(np.flatnonzero(self.sizes)).tolist()
            steps += passes(order, self.sizes, self.settings.tokens_per_step)
        return steps

    def learning_rate(self, step: int) -> float:
        """Of the ``step``-th update, from 0."""
        rising = self.settings.warm_up * len(self.steps)
        if step < rising:
            return self.settings.lr * (step + 1) / (rising + 1)
        done = (step - rising) / max(1.0, len(self.steps) - rising)
        return self.settings.lr * 0.5 * (1 + math.cos(math.pi * done))

    def gradients(self, texts: Sequence[int]) -> float:
        """Add the gradients of the mean loss over all states of some texts to the masters, and return this loss. The processes of
        the group share the passes."""
        states = sum(int(self.masks[index].sum()) for index in texts)
        total = 0.0
        for run in [*passes(texts, self.sizes, self.most)][self.group.rank :: self.group.size]:
            z = raw_values(
                self.model, pack([self.texts[index] for index in run], [self.masks[index] for index in run], self.device)
            )
            loss = state_loss(z, self._targets(run), self.settings.loss).sum() / states
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            if self.masters is not self.parameters:
                self._collect()
        if self.group.size > 1:
            for master in self.masters.values():
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            self.group.sum(master.grad for master in self.masters.values() if master.grad is not None)
        return self._summed(total)[0]

    def _summed(self, *numbers: float) -> list[float]:
        """Sums over the processes of the group."""
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.group.sum([sums])
        return sums.tolist()

    def _targets(self, run: Sequence[int]) -> Tensor:
        remaining = np.concatenate([self.texts[index].remaining[self.masks[index]] for index in run])
        return torch.from_numpy(1 - self.gamma**remaining).to(self.device, torch.float32)

    def _collect(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                master = self.masters[name]
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    def update(self) -> float:
        """Do the next step and return its loss."""
        loss = self.gradients(self.steps[self.progress.step])
        nn.utils.clip_grad_norm_(self.masters.values(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.progress.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._publish()
        self.progress.step += 1
        return loss

    @torch.no_grad()
    def _publish(self) -> None:
        if self.masters is not self.parameters:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])

    def check(self) -> float:
        """Measure the validation loss, and keep the state if it is the best."""
        losses, states = 0.0, 0
        masks = [learned(text, self.gamma, self.settings.margin) for text in self.checked]
        kept = [(text, mask) for text, mask in zip(self.checked, masks, strict=True) if mask.any()]
        kept = kept[self.group.rank :: self.group.size]
        texts, masks = [text for text, _ in kept], [mask for _, mask in kept]
        for text, mask, values in zip(texts, masks, predict(self.model, texts, self.most, self.device, masks=masks), strict=True):
            z = torch.from_numpy(values).logit(1e-9)
            losses += state_loss(z, torch.from_numpy(1 - self.gamma ** text.remaining[mask]), self.settings.loss).sum().item()
            states += int(mask.sum())
        losses, counted = self._summed(losses, states)
        loss = losses / max(1.0, counted)
        self.progress.history.append({"step": self.progress.step, "loss": loss})
        if loss < self.progress.best_loss:
            self.progress.best_loss = loss
            self.progress.best = {name: master.detach().cpu().clone() for name, master in self.masters.items()}
        return loss

    def run(self, path: Path, identity: str, report: Callable[[str], None]) -> None:
        """Do all steps that are left. The state is saved to ``path`` at each check and every few minutes."""
        every = max(1, math.ceil(len(self.steps) / self.settings.checks))
        saved = started = time.monotonic()
        tokens, losses = 0, list[float]()
        while self.progress.step < len(self.steps):
            tokens += sum(self.sizes[index] for index in self.steps[self.progress.step])
            losses.append(self.update())
            step, seconds = self.progress.step, time.monotonic() - started
            checks = step % every == 0 or step == len(self.steps)
            if checks:
                loss = self.check()
                left = (time.monotonic() - started) / max(1, tokens) * self._tokens_left()
                report(
                    f"step {step} of {len(self.steps)}: loss {np.mean(losses):.4f}, validation {loss:.4f}, "
                    f"{tokens / seconds:.0f} tokens/s, {left / 60:.0f} min left"
                )
                losses.clear()
            if self.group.rank:
                continue
            if checks or time.monotonic() - saved > 60 * self.settings.save_minutes:
                self.save(path, identity)
                saved = time.monotonic()

    def _tokens_left(self) -> int:
        return sum(self.sizes[index] for step in self.steps[self.progress.step :] for index in step)

    def save(self, path: Path, identity: str) -> None:
        """Replace ``path`` with the state so far, atomically."""
        masters = {name: master.detach() for name, master in self.masters.items()}
        state = {"identity": identity, "masters": masters, "optimizer": self.optimizer.state_dict(), **vars(self.progress)}
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with draft.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def resume(self, path: Path, identity: str) -> None:
        """Continue from a saved state. Raises :class:`ModelError` if it is damaged or of another training."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            found = state.pop("identity")
            if found == identity:
                with torch.no_grad():
                    for name, master in self.masters.items():
                        master.copy_(state["masters"][name])
                self.optimizer.load_state_dict(state["optimizer"])
                self.progress = Progress(**{name: state[name] for name in vars(self.progress)})
        except Exception as error:  # whatever a damaged file makes torch raise
            raise ModelError(f"{path.name} is damaged ({type(error).__name__}); remove it and train again.") from error
        if found != identity:
            raise ModelError(f"{path.name} is of a training with other data or settings; repeat these, or name another --out.")
        self._publish()

    @torch.no_grad()
    def finish(self) -> tuple[LenVM, dict[str, Tensor]]:
        """Return the model in its best state, as plain layers in evaluation mode, and the additions to all layers if the method is
        ``adapter``, as :meth:`_additions` has them."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.progress.best.get(name, self.masters[name]))
        added: dict[str, Tensor] = {}
        for index, layer in enumerate(self.model.decoder.layers):
            if self.settings.method == "adapter":
                added |= self._additions(index)
            for name in PROJECTIONS:
                if isinstance(part := layer.get_submodule(name), Adapted):
                    layer.set_submodule(name, part.merged())
        return self.model.eval(), added

    def _additions(self, index: int) -> dict[str, Tensor]:
        """The two matrices of each addition to a layer, by the weight's name in a checkpoint. Weights that are computed in one
        product have the first matrix in common, and rows of the second one."""
        layer = copy.deepcopy(self.model.decoder.layers[index])
        downs: dict[int, Tensor] = {}
        for name in PROJECTIONS:
            if isinstance(part := layer.get_submodule(name), Adapted):
                part.projection.weight = part.up
                downs[part.up.untyped_storage().data_ptr()] = part.down.detach()
                layer.set_submodule(name, part.projection)
        found: dict[str, Tensor] = {}
        for name, view in self.model.decoder.layer_views(index, layer).items():
            if (down := downs.get(view.untyped_storage().data_ptr())) is not None:
                found |= {name + DOWN: down.clone(), name + UP: view}
        return found


def write_model(model: LenVM, init: Path, out: Path, facts: dict[str, Any], adapter: Mapping[str, Tensor]) -> None:
    """Write the published layout: decoder, head in a file of its own, files of ``init``, and ``facts`` in :data:`GAMMA_FILE`. With
    an ``adapter`` that is not empty, write it in place of the decoder and the tokeniser, which are those of ``init``.

    Weights have the dtype of those in ``init``; if these are codes, bfloat16, as they are no codes any more.
    """
    stored = next(iter(read_stored(init).values())).dtype
    dtype = _STORED[stored] if method_of(init) is None else torch.bfloat16
    if is_gguf(init):
        config = configuration(init) | {"model_type": family_of(model.config.architecture).model_type}
        if not adapter:
            files = tokenizer_files(init)
            (out / "tokenizer.json").write_bytes(files.tokenizer_json)
            write_json(out / "tokenizer_config.json", {**files.special_tokens, "chat_template": files.chat_template})
    else:
        config = read_json(init / "config.json")
        for key in METHOD_KEYS:
            config.pop(key, None)
    with torch.no_grad():
        for part in model.modules():  # checkpoints of such models store what is added to the offset
            if isinstance(part, RMSNorm) and part.offset:
                part.weight.sub_(part.offset)
    main = {ADAPTER: adapter} if adapter else {SINGLE: model.decoder.checkpoint_views()}
    parts = {**main, VALUE_HEAD: model.checkpoint_views()}
    for name, tensors in parts.items():
        held = {key: tensor.to("cpu", dtype).contiguous() for key, tensor in tensors.items()}
        save_file(held, out / name, metadata={"format": "pt"})
    for name in () if adapter else _COPIED:
        if (init / name).is_file():
            shutil.copyfile(init / name, out / name)
    layers = model.config.num_layers
    config |= {name: config[name][:layers] for name in _OF_LAYERS if config.get(name)}
    config |= {"num_hidden_layers": layers, "torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(out / "config.json", config)
    write_json(out / GAMMA_FILE, facts)  # last: it says that the model is complete


def say(line: str) -> None:
    """Write a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def _command(settings: TrainSettings, *, resume: bool, allow_cut: bool) -> list[str]:
    """The command line of the other processes."""
    given = {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not None}
    flags = [flag for flag, on in (("--resume", resume), ("--allow-censored", allow_cut)) if on]
    return ["train", *(f"--{name.replace('_', '-')}={value}" for name, value in given.items()), *flags]


def train(settings: TrainSettings, *, resume: bool = False, allow_cut: bool = False) -> None:
    """Train a length model and write it to ``settings.out``, with the processes of :mod:`engine.training.parallel`. Raises
    :class:`ModelError`."""
    tell: Callable[[str], None] = (lambda _: None) if is_member() else say  # the first process speaks for all
    out, device = Path(settings.out), torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    state = out / STATE
    if (out / GAMMA_FILE).exists() and not resume:
        raise ModelError(f"{out.name} already has a length model; name another --out.")
    if state.exists() and not resume:
        raise ModelError(f"{out.name} has an unfinished training; continue it with --resume, or name another --out.")
    init = locate(settings.init)
    if is_adapter(init):
        raise ModelError(f"{init.name} is an adapter, from which no training begins; name the model that it was trained on.")
    dataset = read_dataset(Path(settings.data), load_config(init))
    check_tokenizer(dataset.manifest, init)
    if dataset.cut_share > MOST_CUT and not allow_cut:
        raise ModelError(
            f"{dataset.cut_share:.0%} of the answers were cut, so their lengths are unknown; sample with a larger --max-tokens, or "
            "add --allow-censored."
        )
    if dataset.failed:
        tell(f"warning: {dataset.failed} answers are missing, the longest ones perhaps; `yardstick lenvm sample` tries them again")
    texts = dataset.texts("train")
    lengths, ended = [text.length + 1 for text in texts], [text.ended for text in texts]
    l50, l99 = (length_quantile(lengths, ended, share) for share in (0.5, 0.99))
    gamma = settings.gamma or gamma_for(l99)
    usable = torch.cuda.device_count() if device.type == "cuda" else 1
    group = join(settings.processes or usable, _command(settings, resume=resume, allow_cut=allow_cut), device.type)
    if device.type == "cuda":
        device = torch.device("cuda", group.rank)
    model = load_init(init, torch.bfloat16 if device.type == "cuda" else torch.float32, settings.seed, settings.layers)
    trainer = Trainer(model, dataset, gamma, settings, device, group)
    masked = 1 - sum(int(mask.sum()) for mask in trainer.masks) / sum(lengths)
    count = sum(parameter.numel() for parameter in trainer.parameters.values())
    tell(
        f"{len(texts)} answers, {dataset.cut_share:.1%} cut, {masked:.1%} of the states left out; L50 {l50}, L99 {l99}, "
        f"gamma {gamma:.6f}; {count:,} trained parameters, {len(trainer.steps)} steps on {device}"
        + (f" and {group.size - 1} others" if group.size > 1 else "")
    )
    free = ("data", "init", "out", "save_minutes", "processes")
    fixed = {name: value for name, value in msgspec.structs.asdict(settings).items() if name not in free}
    digest = fingerprint(init, torch.float32)
    identity = hashlib.sha256(json.dumps([dataset.digest, digest, gamma, fixed]).encode()).hexdigest()
    out.mkdir(parents=True, exist_ok=True)
    for draft in [] if group.rank else out.glob(f".{STATE}.*"):  # of a run that was killed
        draft.unlink()
    if (out / GAMMA_FILE).exists():
        if facts_of(out).get("training", {}).get("identity") != identity:
            raise ModelError(f"{out.name} already has a length model, of other data or settings; name another --out.")
        state.unlink(missing_ok=True)
        tell(f"{out} is complete")
        return
    if state.exists():
        trainer.resume(state, identity)
        tell(f"continuing after step {trainer.progress.step}")
    with group.watched():
        trainer.run(state, identity, tell)
    group.leave()
    model, added = trainer.finish()
    facts: dict[str, Any] = {
        "gamma": gamma,
        "base_model": dataset.manifest.get("model"),
        "base_fingerprint": dataset.manifest.get("fingerprint"),
        "tokenizer": tokenizer_digest(init),
        "end_tokens": sorted({*model.config.eos_token_ids, *dataset.manifest.get("end_tokens", [])}),
        "l50": l50,
        "l99": l99,
        **judge(model, trainer.checked, gamma, trainer.most, device, spellings_in(init)),
        "training": {
            "identity": identity,
            "init": Path(settings.init).name,
            "init_fingerprint": digest,
            "answers": len(texts),
            "cut_share": dataset.cut_share,
            "states_left_out": masked,
            "best_validation_loss": trainer.progress.best_loss,
            "history": trainer.progress.history,
            "settings": fixed,
        },
    }
    write_model(model, init, out, facts, added)
    state.unlink(missing_ok=True)
    say(f"{out} is complete: validation loss {trainer.progress.best_loss:.4f}")
