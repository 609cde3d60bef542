"""Models that call fa4, exported by torch: programs and packages give what the model gives."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import fa4

HEADS, HEAD_DIM = 4, 8
RUN = """
import sys, torch, fa4
program, data = sys.argv[1:]
inputs, expected = torch.load(data)
for got, x in zip(torch.export.load(program).module()(*inputs), expected, strict=True):
    assert torch.equal(got, x), (got - x).abs().max()
"""


SLOPES = torch.linspace(0.1, 0.5, HEADS)


def far_is_less(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


class Attention(nn.Module):
    """Attention in the three forms that public functions have: padded with options, packed, and with mods."""

    def __init__(self, with_mods=True):
        super().__init__()
        self.with_mods = with_mods
        self.qkv = nn.Linear(32, 3 * HEADS * HEAD_DIM)
        self.sink = nn.Parameter(torch.linspace(-1, 1, HEADS))
        self.register_buffer("bounds", torch.tensor([0, 5, 12], dtype=torch.int32))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        padded = fa4.flash_attn_func(
            q, k, v, causal=True, window_size=(7, None), softcap=5.0, learnable_sink=self.sink, return_lse=True
        )
        lengths = dict(cu_seqlens_q=self.bounds, cu_seqlens_k=self.bounds)
        packed = fa4.flash_attn_varlen_func(q[0], k[0], v[0], **lengths, max_seqlen_q=7, max_seqlen_k=7, causal=True)
        if not self.with_mods:
            return *padded, packed
        return *padded, packed, fa4.flash_attn_func(q, k, v, score_mod=far_is_less, mask_mod=fa4.masks.causal)


def exported(strict, seed, with_mods=True):
    """A program for batches of 1 to 16 and lengths from 12 to 64, and the model."""
    torch.manual_seed(seed)
    model = Attention(with_mods).eval()
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=16), 1: torch.export.Dim("seqlen", min=12, max=64)}}
    return model, torch.export.export(model, (torch.randn(2, 16, 32),), strict=strict, dynamic_shapes=shapes)


def test_an_exported_model_is_saved_and_loaded(seed, tmp_path):
    """And gives the same, with other sizes than it was shown."""
    model, program = exported(False, seed)
    operators = [str(node.target) for node in program.graph.nodes if "fa4" in str(node.target)]
    assert operators == ["fa4.forward.default", "fa4.forward.default", "fa4.forward_with_mods.default"]
    torch.export.save(program, tmp_path / "model.pt2")
    x = torch.randn(3, 21, 32)
    for got, expected in zip(torch.export.load(tmp_path / "model.pt2").module()(x), model(x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.soak
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_an_exported_model_runs_in_another_process(strict, seed, tmp_path):
    """Where nothing but fa4 is known."""
    model, program = exported(strict, seed)
    torch.export.save(program, tmp_path / "model.pt2")
    x = torch.randn(3, 21, 32)
    with torch.no_grad():
        torch.save(((x,), model(x)), tmp_path / "data")
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "model.pt2"), str(tmp_path / "data")], check=True)


@pytest.mark.soak
def test_aotinductor_runs_a_package(seed, tmp_path):
    """Compiled C++, which calls fa4's operators: it needs a C++ compiler, and takes a minute. Not with mods: torch 2.13
    hands None to an operator there that takes a list of tensors, where the list is empty."""
    model, program = exported(False, seed, with_mods=False)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for shape in ((3, 21, 32), (1, 64, 32)):
        x = torch.randn(shape)
        with torch.no_grad():
            for got, expected in zip(run(x), model(x), strict=True):
                assert (got - expected).abs().nan_to_num().max() < 1e-5
