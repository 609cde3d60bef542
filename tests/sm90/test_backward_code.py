"""What the compiler made of the Hopper backward: products in flight where they are meant, no spilled registers."""

import re

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.host.modules import fatbins_in
from warpcheck.timing.sass.code import nvdisasm

from bench import static
from fa4.mods.ir.record import ModSpec
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.sm90.bwd.plan import Sm90Backward

pytestmark = pytest.mark.rotates(2)

# As written: how many groups each wait leaves in flight, and products; ptxas serialises them (a fence before and a wait
# after each) where it thinks that registers in flight are touched. A first step without dQ, which ptxas waits in once
# more, and a last dQ stand around two loops with a step each, of masked and of whole blocks. A warpgroup that has no dQ
# has three steps without.
STEPS = ("0" + "1010" + "10110" * 2 + "0", 4 + 5 * 2 + 1)
ONE_HAS_DQ = (STEPS[0] + "1010" * 3, STEPS[1] + 4 * 3)
ODD_PANEL = (STEPS[0], STEPS[1] + 3)  # of dQ a product more in each loop, and at the end
HALVES = (STEPS[0][:-1] + "10110" + "0", STEPS[1] + 5)  # steps of half of the queries, too
# dV's first step, its two loops and its last dQ, then dK's, which has one loop. dQ of a pair takes a product more.
WIDE = ("00" + "010" * 2 + "0" + "00" + "010" + "0", 2 + 3 * 2 + 1 + 2 + 3 + 1)
PAIR = (WIDE[0].replace("010", "020"), WIDE[1] + 5)
# Each is compiled anew; the soak does the others of its kind of steps.
CODE = [
    pytest.param(64, {"window_right": 0}, *STEPS, id="d64", marks=pytest.mark.soak),
    pytest.param(64, {"window_left": 127, "window_right": 0}, *HALVES, id="d64_window"),
    pytest.param(96, {}, *ONE_HAS_DQ, id="d96", marks=pytest.mark.soak),
    pytest.param(128, {"window_right": 0}, *STEPS, id="d128"),
    pytest.param(128, {}, *STEPS, id="d128_full", marks=pytest.mark.soak),
    pytest.param(128, {"deterministic": True}, *STEPS, id="deterministic", marks=pytest.mark.soak),
    pytest.param(128, {"softcap": 20.0, "window_right": 0}, *STEPS, id="softcap", marks=pytest.mark.soak),
    pytest.param(192, {"head_dim_v": 128, "window_right": 0}, *ODD_PANEL, id="d192_128"),
    pytest.param(192, {"head_dim_v": 128, "softcap": 9.0}, *ODD_PANEL, id="d192_128_softcap", marks=pytest.mark.soak),
    pytest.param(192, {}, *PAIR, id="d192", marks=pytest.mark.soak),
    pytest.param(256, {"window_right": 0}, *PAIR, id="d256"),
    pytest.param(256, {"window_left": 99, "window_right": 0}, *PAIR, id="d256_window"),
    pytest.param(256, {"deterministic": True}, *PAIR, id="d256_full", marks=pytest.mark.soak),
    pytest.param(192, {"deterministic": True}, *PAIR, id="d192_deterministic", marks=pytest.mark.soak),
    pytest.param(256, {"head_dim_v": 128}, *WIDE, id="d256_128", marks=pytest.mark.soak),
    pytest.param(256, {"mods": ModSpec(dropout=True)}, *PAIR, id="d256_dropout", marks=pytest.mark.soak),
]


MANY_KEYS = ProblemSize(4, 4096, 4096)
FEW_KEYS = ProblemSize(1, 1 << 14, 256)  # several CTAs share a key block


def machine_code(spec, directory, extent=MANY_KEYS) -> str:
    """Of the main kernel, whose name ends its part of the disassembly's head."""
    exported = directory / "kernel.o"
    backward = Sm90Backward(spec, extent, chip_by_number(90))
    backward.kernel.compile(backward.config(has_dlse=False), backward.chip).export_to_c(str(exported), "kernel")
    parts = []
    for i, binary in enumerate(fatbins_in(exported.read_bytes())):
        cubin = directory / f"{i}.cubin"
        cubin.write_bytes(binary[binary.index(b"\x7fELF") :])
        parts += re.split(r"^\s*\.section\s+\.text\.", static.disassemble(cubin, "-c"), flags=re.M)[1:]
    (code,) = [part for part in parts if part.startswith("fa4_sm90_backward")]
    return code


@pytest.mark.parametrize(("head_dim", "flags", "waits", "fences"), CODE)
def test_products_overlap_and_nothing_spills(head_dim, flags, waits, fences, tmp_path):
    try:
        nvdisasm()
    except FileNotFoundError:
        pytest.skip("reads machine code by nvdisasm, of the package nvidia-cuda-nvdisasm")
    shape = {"head_dim": head_dim, "head_dim_v": head_dim} | flags
    spec = AttentionSpec(torch.bfloat16, heads_q=16, heads_kv=16, softmax_scale=0.1, needs_backward=True, **shape)
    code = machine_code(spec, tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", code), "registers are spilled"
    is_wide = (waits, fences) in (WIDE, PAIR)
    assert code.count("USETMAXREG") == (3 if is_wide else 2)
    assert code.count("WARPGROUP.ARRIVE") == fences
    assert "".join(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", code)) == waits
    if is_wide:
        return
    if (waits, fences) == ODD_PANEL:  # so few registers are left that half of them stand behind it
        return
    # Where nothing is masked most of a step's exp2 stand after the wait for S and before the one for dP.
    beside_dp = re.findall(r"DEPBAR\.LE gsb0, 0x1((?:(?!DEPBAR).)*)DEPBAR\.LE gsb0, 0x0", code, flags=re.S)
    assert any(part.count("MUFU.EX2") >= 20 for part in beside_dp)


@pytest.mark.parametrize(
    ("head_dim", "flags"),
    [
        pytest.param(64, {}, id="d64", marks=pytest.mark.soak),
        pytest.param(128, {"window_right": 0}, id="d128"),
    ],
)
def test_parts_spill_nothing(head_dim, flags, tmp_path):
    """Sums of dV and dK are stored from the registers that hold them."""
    spec = AttentionSpec(torch.bfloat16, head_dim, head_dim, 8, 8, 0.1, needs_backward=True, **flags)
    assert not re.search(r"\b(LDL|STL)\b", machine_code(spec, tmp_path, FEW_KEYS)), "registers are spilled"
