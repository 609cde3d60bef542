"""Counters of work tiles: one of each stream, and one of each launch in a captured graph."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from fa4.runtime import counters
from fa4.runtime.device import chip_by_number

CHIP = chip_by_number(90)


class OnGpu(SimpleNamespace):
    """A tensor of GPU 0, as far as counters look at it."""

    is_cuda, device = True, torch.device("cuda", 0)

    def new_zeros(self, *shape, dtype):
        return torch.zeros(*shape, dtype=dtype)


def test_launches_on_a_stream_share_a_counter_and_captured_ones_do_not(monkeypatch):
    streams, is_capturing = iter([7, 7, 9, 7]), [False]
    monkeypatch.setattr(counters, "_of_streams", {})
    monkeypatch.setattr(counters, "current_raw_stream", lambda index: next(streams))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    first, second, other = (counters.tile_counter(OnGpu(), CHIP) for _ in range(3))
    assert first is second and first is not other and not other.any()
    is_capturing[0] = True
    captured = [counters.tile_counter(OnGpu(), CHIP) for _ in range(2)]
    assert captured[0] is not captured[1] and all(x is not first for x in captured)
    is_capturing[0] = False
    assert counters.tile_counter(OnGpu(), CHIP) is first


def test_without_a_gpu_each_launch_has_one():
    for q, chip in ((torch.ones(1, dtype=torch.bfloat16), CHIP), (OnGpu(), replace(CHIP, emulated=True))):
        made = [counters.tile_counter(q, chip) for _ in range(2)]
        assert made[0] is not made[1] and not made[0].any() and made[0].dtype is torch.int32
