"""Key blocks that L2 keeps between waves of CTAs."""

from __future__ import annotations

import dataclasses

import pytest

from fa4.emulator.l2_reuse import KeyTraffic

BLOCK = 1 << 10
# Four waves of eight CTAs in step; L2 holds 40 of 64 blocks.
TRAFFIC = KeyTraffic(
    heads=1, tiles=32, blocks=64, block_bytes=BLOCK, ctas=8, step=1000, ahead=2, l2_bytes=40 * BLOCK, dram_bytes=1e3
)


@pytest.mark.parametrize("sawtooth", [False, True])
def test_what_l2_holds_is_read_once(sawtooth):
    fits = dataclasses.replace(TRAFFIC, heads=3, l2_bytes=3 * 64 * BLOCK)
    assert fits.simulate(sawtooth).nbytes == 3 * 64 * BLOCK


def test_the_same_order_finds_nothing_of_the_wave_before():
    assert TRAFFIC.simulate(False).nbytes == 4 * 64 * BLOCK


def test_sawtooth_finds_what_l2_holds():
    # The CTAs of a wave end at different steps, so the first of the next wave find some blocks already read.
    expected = 64 + 3 * (64 - 40)
    assert TRAFFIC.simulate(True).nbytes == pytest.approx(expected * BLOCK, rel=0.1)


def test_time_is_the_products_or_device_memory():
    steps = 4 * 64 * TRAFFIC.step
    assert TRAFFIC.simulate(False).cycles == pytest.approx(steps, rel=0.02)
    slow = dataclasses.replace(TRAFFIC, dram_bytes=BLOCK / (2 * TRAFFIC.step))
    same, sawtooth = (slow.simulate(order) for order in (False, True))
    assert same.cycles == pytest.approx(2 * steps, rel=0.02)
    assert sawtooth.cycles < 0.8 * same.cycles
