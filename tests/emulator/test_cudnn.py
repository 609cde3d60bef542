"""nvidia-cudnn-frontend's kernels as their times are predicted: values against the float64 formula."""

import pytest
import torch
from warpcheck.machine import Checks

from tests.emulator.public.rows import attention, by_formula, draw
from warpcheck import emulate

pytest.importorskip("cudnn")
from fa4.emulator.cudnn import LONG, Attention, kernels_of


def formula(causal):
    def attend(q, k, v, upstream):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*given, causal=causal)
        return [out.detach(), *torch.autograd.grad(out, given, upstream)]

    return attend


@pytest.mark.parametrize("seqlen", [1, LONG], ids=["pairs", "clusters of four"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_gradients_of_the_kernels_of_a_length(head_dim, causal, seqlen):
    checks = Checks(races=False, poison=False)
    with emulate("sm_100a", sms=4, checks=checks, on_finding="collect", tells_devices_apart=True):
        shapes = (1, 200, 2, head_dim), (1, 200, 1, head_dim), (1, 200, 1, head_dim), (1, 200, 2, head_dim)
        q, k, v, upstream = draw(0, *shapes)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = Attention.apply(*leaves, causal)
        with kernels_of(seqlen):
            grads = torch.autograd.grad(out, leaves, upstream)
        inputs = *(x.detach() for x in leaves), upstream
        for judgement in by_formula(["out", "dq", "dk", "dv"], [out.detach(), *grads], formula(causal), *inputs):
            assert judgement.right, judgement
