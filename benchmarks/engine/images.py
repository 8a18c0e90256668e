"""Files to pixels in the gateway, and pixels to embeddings in the engine, beside transformers: ``python -m benchmarks images``.

*Pixels* is what a text worker of the gateway does with a file: decode it, resize it, and put its pixels into the order of patches.
transformers' processor does the same and also normalises, which is part of the engine's tower here. *Tower* is the forward pass of
one image in float32 on ``--device``, with random weights: a quarter of the width of Qwen2.5-VL-3B's tower, and four layers, one of
them with full attention. Both sides get the same files and images, and their results are compared. They alternate; a time is the
median of the rounds' CPU times (of a tower on a GPU, of the times until the GPU has computed), a ratio the median of the rounds'
ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from PIL import ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.engine.machine import describe
from engine.models.loader import load_model
from engine.models.vision.tower import VisionTower
from engine.models.vision.windows import grid_of
from engine.settings import DEVICES
from engine.wire import Image, VisionInfo
from gateway.images.decode import decode
from gateway.images.patches import patch_order, prepare
from tests.engine.vision.models import Reference, make_vision_checkpoint, picture, some_image

PATCH, MERGE = 14, 2
FILES = (("JPEG", 640, 480), ("JPEG", 1600, 1200), ("PNG", 1280, 960), ("WEBP", 1280, 960))
GRIDS = ((16, 16), (34, 46), (64, 64))
"""Rows and columns of patches; the second is an image of 640 by 480 pixels."""
TOWER: dict[str, Any] = {"depth": 4, "hidden_size": 320, "intermediate_size": 864, "num_heads": 4, "fullatt_block_indexes": [3]}

Work = Callable[[], Any]


def main(arguments: Sequence[str]) -> int:
    """Measure and print a line for each case and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks images", description="Images, beside transformers.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1, help="of the tower; files are read by one thread")
    parser.add_argument("--device", choices=DEVICES, default="cuda" if torch.cuda.is_available() else "cpu", help="of the tower")
    parser.add_argument("--quick", action="store_true", help="few rounds and small images, only to check the benchmark")
    parser.add_argument("--out", type=Path, help="folder for summary.json")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    rounds = 2 if asked.quick else asked.rounds
    files = [("JPEG", 64, 48), ("PNG", 64, 48)] if asked.quick else FILES
    result: dict[str, Any] = {
        "unit": "ms CPU an image" if asked.device == "cpu" else "ms an image",
        "pixels": {f"{kind} {width} x {height}": pixels(kind, width, height, rounds) for kind, width, height in files},
    }
    with tempfile.TemporaryDirectory() as root:
        checkpoint = make_vision_checkpoint(Path(root), **TOWER)
        tower, reference = load_model(checkpoint).tower.to(asked.device), Reference(checkpoint)
        assert isinstance(tower, VisionTower)
        reference.model.to(asked.device)
        result["tower"] = {
            f"{rows} x {columns} patches": embeddings(tower, reference, rows, columns, rounds)
            for rows, columns in (GRIDS[:1] if asked.quick else GRIDS)
        }
    for part in ("pixels", "tower"):
        for name, row in result[part].items():
            steps = ", ".join(f"{step} {row[step]:.2f}" for step in ("decode", "resize", "patches") if step in row)
            print(f"{part:<6} {name:<18} {row['ours']:8.2f} ms, {row['ratio']:.3f} x transformers {steps}")
    result |= {"rounds": rounds, "shape": TOWER, "machine": describe()}
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "summary.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def pixels(kind: str, width: int, height: int, rounds: int) -> dict[str, Any]:
    """Measure a file that looks like a photograph. Raises SystemExit if the pixels differ."""
    content = photograph(kind, width, height)
    processor = Qwen2VLImageProcessorPil()
    size = processor.size
    vision = VisionInfo(PATCH, MERGE, size["shortest_edge"], size["longest_edge"], image_token=0)

    def ours() -> Image:
        return prepare(decode(content, max_pixels=1 << 25), vision)

    def theirs() -> Any:
        return processor(images=[ImageOps.exif_transpose(Pillow.open(BytesIO(content)))])

    image, expected = ours(), theirs()
    scaled = np.frombuffer(image.pixels, np.uint8).reshape(-1, 3, 1, PATCH * PATCH) / 255
    mean, deviation = (np.array(each).reshape(3, 1, 1) for each in (processor.image_mean, processor.image_std))
    normalised = np.repeat((scaled - mean) / deviation, processor.temporal_patch_size, axis=2)
    if np.abs(normalised.reshape(len(scaled), -1) - np.array(expected["pixel_values"])).max() > 1e-5:
        raise SystemExit(f"{kind} {width} x {height}: the pixels are not those of transformers")
    decoded = decode(content, max_pixels=1 << 25)
    resized = decoded.resize((image.columns * PATCH, image.rows * PATCH), Pillow.Resampling.BICUBIC)
    flat = resized.tobytes()
    steps: dict[str, Work] = {
        "decode": lambda: decode(content, max_pixels=1 << 25),
        "resize": lambda: decoded.resize(resized.size, Pillow.Resampling.BICUBIC),
        "patches": lambda: patch_order(flat, image.columns, patch=PATCH, merge=MERGE),
    }
    alone = {name: round(median(milliseconds(work) for _ in range(rounds)), 3) for name, work in steps.items()}
    return compared(ours, theirs, rounds) | alone


def embeddings(tower: VisionTower, reference: Reference, rows: int, columns: int, rounds: int) -> dict[str, Any]:
    """Measure the towers. Raises SystemExit if their embeddings differ."""
    image, device = some_image(1, rows, columns), next(tower.parameters()).device
    config, size = tower.config, PATCH * PATCH * 3
    given = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(1, -1, size).to(device)
    made = Qwen2VLImageProcessorPil()(
        picture(image), do_resize=False, return_tensors="pt", input_data_format="channels_first"
    )  # as their processor leaves it: normalised

    @torch.inference_mode()
    def ours() -> torch.Tensor:
        found: torch.Tensor = tower(given, grid_of(rows, columns, config.merge_size, config.window))[0]
        return found

    @torch.inference_mode()
    def theirs() -> torch.Tensor:
        visual = reference.model.model.visual
        found: torch.Tensor = visual(made["pixel_values"].to(device), grid_thw=made["image_grid_thw"].to(device)).pooler_output
        return found

    difference = (ours() - theirs()).abs().max().item()
    if difference > 1e-3:
        raise SystemExit(f"{rows} x {columns} patches: the embeddings differ from those of transformers by {difference}")
    clock = time.process_time if device.type == "cpu" else seconds_on_gpu
    return compared(ours, theirs, rounds, clock) | {"largest_difference": difference}


def photograph(kind: str, width: int, height: int) -> bytes:
    """Return a file of smooth shapes with a little noise."""
    rng = np.random.default_rng(0)
    coarse = Pillow.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), Pillow.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(coarse, np.int16) + rng.integers(-4, 5, (height, width, 3)), 0, 255).astype(np.uint8)
    file = BytesIO()
    Pillow.fromarray(noisy).save(file, kind, quality=90)
    return file.getvalue()


def compared(ours: Work, theirs: Work, rounds: int, clock: Callable[[], float] = time.process_time) -> dict[str, Any]:
    """Measure both in turn, after each has run once."""
    pairs = []
    for number in range(rounds):
        order = (theirs, ours) if number % 2 else (ours, theirs)
        taken = {work: milliseconds(work, clock) for work in order}
        pairs.append((taken[ours], taken[theirs]))
    ratios = sorted(mine / other for mine, other in pairs)
    return {
        "ours": round(median(mine for mine, _ in pairs), 3),
        "transformers": round(median(other for _, other in pairs), 3),
        "ratio": round(median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def seconds_on_gpu() -> float:
    """Return the time on the clock once the GPU has computed everything."""
    torch.cuda.synchronize()
    return time.perf_counter()


def milliseconds(work: Work, clock: Callable[[], float] = time.process_time) -> float:
    """Milliseconds of ``work`` on ``clock``."""
    before = clock()
    work()
    return (clock() - before) * 1e3
