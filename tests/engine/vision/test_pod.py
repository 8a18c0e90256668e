"""Images through the HTTP face of a pod."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from engine import wire
from engine.server.loop_process import INLINE_BYTES
from tests.engine.vision.models import Reference, make_vision_checkpoint, shown, some_image
from tests.processes import Pod
from tests.warm import as_in_production


@pytest.mark.slow
def test_a_pod_reads_images(tmp_path: Path) -> None:
    """Small and large ones, whose pixels are read beside the loop; a wrong digest has its status, and metrics their names."""
    directory = make_vision_checkpoint(tmp_path)
    images = [some_image(1, 4, 6), some_image(2, 44, 44)]
    assert len(images[1].pixels) > INLINE_BYTES
    prefix = [9, *shown(0, images[0]), *shown(1, images[1])]
    message = wire.Score("s", prefix, [[10, 11]], wire.Labels([5, 17]), images=images)
    with as_in_production():
        pod = Pod(directory, "--name", "vision")
    try:
        pod.wait_ready()
        info = pod.read("/info", wire.Info)
        assert info.vision == wire.VisionInfo(14, 2, 3136, 28 * 28 * 1280, 5, max_tokens=info.vision.max_tokens)
        status, scored = pod.ask("/score", message)
        assert status == 200
        wanted = torch.tensor([Reference(directory).row([*prefix, 10, 11], images, [5, 17])])
        torch.testing.assert_close(torch.tensor(scored.rows), wanted, atol=1e-5, rtol=1e-5)
        wrong = msgspec.structs.replace(message, id="w", images=[images[0], msgspec.structs.replace(images[1], digest=bytes(16))])
        status, failed = pod.ask("/score", wrong)
        assert (status, failed.message) == (400, "The digest of image 1 is not that of its pixels.")
        replies = pod.stream(wire.Generate("g", prefix, wire.Sampling(max_tokens=3, ignore_eos=True), images=images))
        assert sum(len(reply.tokens) for reply in replies) == 3
        assert "yardstick_engine_computed_images_total 2.0" in pod.client.get("/metrics").text
    finally:
        pod.close()
