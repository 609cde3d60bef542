"""What the compiler made of the Hopper forwards: products in flight where they should be, no spilled registers."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from bench import static
from fa4.runtime import scaled_rows
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, CacheSpec, ProblemSize
from fa4.sm90.fwd.plan import Sm90Forward
from fa4.sm90.latent.plan import LatentForward
from tests.machine_code import machine_code

# (head_dim, head_dim_v, causal, rows): a row of tiles each. Each is compiled anew; the soak does the others.
SHAPES = [
    (128, 128, True, 4096),
    (64, 64, True, 1024),
    *(
        pytest.param(shape, marks=pytest.mark.soak)
        for shape in ((64, 64, False, 4096), (96, 96, True, 4096), (192, 192, False, 4096), (256, 256, True, 4096))
    ),
]
# As written: a first block, half and whole; both products of a step, masked and not; the last product. ptxas adds a
# fence before every wgmma, and a wait after it, where it thinks that registers in flight are touched.
FENCES = WAITS = 7


def forward_of(shape) -> Sm90Forward:
    head_dim, head_dim_v, causal, rows = shape
    spec = AttentionSpec(torch.bfloat16, head_dim, head_dim_v, 64, 64, 0.1, window_right=0 if causal else None)
    return Sm90Forward(spec, ProblemSize(4, rows, rows), chip_by_number(90))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_overlap_softmax_and_nothing_spills(shape, tmp_path, disassembler):
    code, kernel = machine_code(forward_of(shape), tmp_path)
    assert static.problems(kernel) == []
    marks = re.findall(r"WARPGROUP\.ARRIVE|WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", "\n".join(code))
    assert marks.count("") == FENCES and len(marks) - marks.count("") == WAITS
    # Between a wait that leaves a product in flight and the next, for all: the block's exp2s.
    text = "\n".join(code)
    overlapped = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", text, flags=re.S)
    rest = re.split(r"DEPBAR\.LE gsb0, 0x1.*?DEPBAR\.LE gsb0, 0x0", text, flags=re.S)
    assert len(overlapped) == 2
    for part in overlapped:
        assert part.count("MUFU.EX2") >= 32  # of the narrowest blocks, all
    assert len(rest) == 3 and "MUFU.EX2" not in rest[-1].partition("WARPGROUP.ARRIVE")[0]


def test_one_block_spills_nothing_and_its_products_are_not_serialised(tmp_path, disassembler):
    """S of 136 keys, P and O of a warpgroup that has 112 registers a thread."""
    spec = AttentionSpec(torch.bfloat16, 64, 64, 64, 8, 0.1, window_left=127, window_right=0)
    forward = Sm90Forward(spec, ProblemSize(2, 8192, 8192), chip_by_number(90))
    assert forward.cfg.one_block and forward.cfg.regs[0] == 112
    code, kernel = machine_code(forward, tmp_path)
    assert static.problems(kernel) == []
    assert sum("WARPGROUP.ARRIVE" in line for line in code) == 2  # one for each product


LATENT = AttentionSpec(torch.bfloat16, 576, 512, 16, 1, 0.1, window_right=0, has_seqused_k=True, v_in_k=True)
E4M3, INT8, ROWS = torch.float8_e4m3fn, torch.int8, scaled_rows.DTYPE


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    "changes",
    [
        dict(cache=CacheSpec(page_size=64)),
        dict(cache=CacheSpec(page_size=1)),
        dict(cache=CacheSpec(page_size=64, dtype=E4M3)),
        dict(cache=CacheSpec(page_size=1, has_leftpad=True, dtype=INT8)),
        dict(cache=CacheSpec(page_size=64, dtype=ROWS)),
        dict(cache=CacheSpec(dtype=ROWS)),
        dict(cache=CacheSpec(page_size=1, has_leftpad=True, dtype=ROWS), varlen=True),
        dict(cache=CacheSpec(dtype=E4M3), dtype=torch.float16),
        dict(cache=CacheSpec(dtype=INT8), head_dim=512),
        dict(cache=CacheSpec(page_size=64, dtype=E4M3), varlen=True, softcap=5.0, window_left=9, heads_q=5),
    ],
    ids=str,
)
def test_latents_spill_nothing_and_products_are_not_serialised(changes, tmp_path, disassembler):
    forward = LatentForward(replace(LATENT, **changes), ProblemSize(4, 1, 1 << 15), chip_by_number(90))
    assert static.problems(machine_code(forward, tmp_path)[1]) == []


@pytest.mark.rotates(2)
@pytest.mark.parametrize("changes", [{}, dict(has_leftpad=True, page_size=24)], ids=str)
def test_lists_of_latents_spill_nothing_in_ctas_of_several_tiles(changes, tmp_path, disassembler):
    """A copy is one instruction: its offsets are in it. Two instances copy 64 rows of 9 panels each by 64 threads."""
    cache = replace(CacheSpec(page_size=1), **changes)
    forward = LatentForward(replace(LATENT, cache=cache, heads_q=128), ProblemSize(4096, 1, 2048), chip_by_number(90))
    assert forward.cfg.persistent
    code, kernel = machine_code(forward, tmp_path)
    assert static.problems(kernel) == []
    copies = re.findall(
        r"LDGSTS\.E\.BYPASS\.128 \[R\d+(\+0x\w+)?\], desc\[UR\d+\]\[R\d+\.64(\+0x\w+)?\]", "; ".join(code)
    )
    assert len(copies) == 2 * 8 * 9
    assert len({offset for _, offset in copies}) == 9


def test_what_must_not_be_is_told():
    """Spills, a lost setmaxnreg, a wait after each product; a kernel without roles needs no setmaxnreg."""
    good = static.Kernel("k", "168/240/24", 0, 3000, (), products=70, fences=8)
    assert static.problems(good) == [] == static.problems(replace(good, registers="168"), has_roles=False)
    for change, word in (
        ({"local": 2}, "spilled"),
        ({"registers": "168"}, "setmaxnreg"),
        ({"fences": 70}, "serialised"),
    ):
        (problem,) = static.problems(replace(good, **change))
        assert word in problem
