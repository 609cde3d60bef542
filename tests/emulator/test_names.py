"""Reports call warps and barriers what the kernel's own tables call them."""

import dataclasses
import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.context import Gpu
from warpcheck.errors import Deadlock
from warpcheck.machine.names import names_in, with_names
from warpcheck_cases.handwritten import entry

from fa4.emulator import emulate
from fa4.oracle import cases


def test_names_travel_in_the_text():
    ptx = with_names(with_names(entry("", 0), "test", {0: "load"}, {16: "load_mma_KV.full[0]"}), "other", {0: "no"}, {})
    assert names_in(ptx, "test") == ({0: "load"}, {16: "load_mma_KV.full[0]"})
    assert names_in(entry("", 0), "test") == ({}, {})


def test_a_deadlock_of_our_kernel_names_channels_and_roles(monkeypatch):
    """The forward without its tcgen05.commit: nobody learns that a product is done."""
    run = Gpu.run

    def without_commits(gpu, launch):
        run(gpu, dataclasses.replace(launch, ptx=re.sub(r"^.*tcgen05\.commit.*$", "", launch.ptx, flags=re.M)))

    monkeypatch.setattr(Gpu, "run", without_commits)
    problem = cases.make(cases.Case("fwd", seqlen_q=64, seqlen_k=64, head_dim=64), seed=1)
    with emulate("sm_100a"), pytest.raises(Deadlock) as caught:
        problem.call(backend="sm100")
    text = str(caught.value)
    assert re.search(r"on mma_softmax_S\.full\[0\] \(mbarrier at 0x\w+\) of CTA 0 .*\n +at .*\(softmax\)", text), text
    assert re.search(r"on mma_softmax_S\.free\[0\] .* 8 of 8 arrivals missing\n +at .*\(mma\)", text), text


def test_reports_of_our_kernel_name_roles():
    problem = cases.make(cases.Case("fwd", seqlen_q=64, seqlen_k=64, head_dim=64), seed=1)
    with emulate("sm_100a") as gpu:
        problem.call(backend="sm100")
    assert {"softmax", "correction", "mma", "load"} <= set(gpu.launches[0].roles.values())
