"""Products in float32 by compiled loops."""

from __future__ import annotations

import pytest
import torch

from yardstick_llm.kernels import panels
from yardstick_llm.kernels.panels import pack, panel_linear
from yardstick_llm.kernels.runtime import loops


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 20, 384])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("biased", [False, True])
def test_products(size: int, lanes: int, biased: bool) -> None:
    """For all remainders of a tile's rows and of a panel's outputs; a row's numbers do not depend on the rows beside it."""
    out = lanes * loops().LANES
    weight, bias, x = random(out, size), random(out, seed=1) if biased else None, random(200, size, seed=2)
    packed = pack(weight)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias)
    whole = panel_linear(x, packed, bias)
    assert (whole - expected).abs().max() < 2e-6 * size**0.5 * 4
    for rows in range(14):
        assert panel_linear(x[:rows], packed, bias).equal(whole[:rows])


def test_threads_share_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, before = pack(random(1000 // loops().LANES * loops().LANES, 64)), random(9, 64, seed=1), torch.get_num_threads()
    found = []
    try:
        for threads, part in ((1, 1), (2, 1), (3, 1), (2, 1 << 30)):
            monkeypatch.setattr(panels, "PART", part)
            torch.set_num_threads(threads)
            found.append(panel_linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(each.equal(found[0]) for each in found)


def test_what_can_be_packed() -> None:
    assert panels.takes(3 * loops().LANES)
    assert not panels.takes(3 * loops().LANES + 1)
