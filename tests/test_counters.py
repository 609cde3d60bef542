"""Counters of work tiles: one of each stream, and one of each launch in a captured graph."""

import torch

from fa4.runtime import counters


def test_launches_on_a_stream_share_a_counter_and_captured_ones_do_not(monkeypatch):
    streams, is_capturing, cuda = iter([7, 7, 9, 7]), [False], torch.device("cuda", 0)
    zeros = torch.zeros
    monkeypatch.setattr(counters, "_of_streams", {})
    monkeypatch.setattr(counters, "current_raw_stream", lambda index: next(streams))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    first, second, other = (counters.tile_counter(cuda) for _ in range(3))
    assert first is second and first is not other and not other.any()
    is_capturing[0] = True
    captured = [counters.tile_counter(cuda) for _ in range(2)]
    assert captured[0] is not captured[1] and all(x is not first for x in captured)
    is_capturing[0] = False
    assert counters.tile_counter(cuda) is first


def test_without_a_gpu_each_launch_has_one():
    made = [counters.tile_counter(torch.device("cpu")) for _ in range(2)]
    assert made[0] is not made[1] and not made[0].any() and made[0].dtype is torch.int32
