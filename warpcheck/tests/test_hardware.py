"""The comparison with a chip, against a stand-in: an emulated chip behind the device's interface."""

import ctypes

import pytest
from click.testing import CliRunner
from warpcheck.host.memory import Heap
from warpcheck.machine import Allocation, EmulationOptions, Machine
from warpcheck.tools import compare, libcuda
from warpcheck.tools.recording import Recording

PTX = """.version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry test(.param .u64 x) {
.reg .b64 %d<2>; .reg .f32 %f<2>;
ld.param.u64 %d0, [x]; ld.global.f32 %f0, [%d0]; add.f32 %f0, %f0, 0f3F800000; st.global.f32 [%d0], %f0; ret; }"""


class StandIn:
    """A device whose memory is the host's; `flaw` is xored into the first byte of everything read."""

    name, chip = "stand-in", "sm_90a"
    flaw = 0

    def __init__(self) -> None:
        self.heap = Heap()
        self.sizes = {}

    def allocate(self, content: bytes) -> int:
        address = self.heap.allocate(max(1, len(content)))
        ctypes.memmove(address, content, len(content))
        self.sizes[address] = len(content)
        return address

    def read(self, address: int, nbytes: int) -> bytes:
        raw = ctypes.string_at(address, nbytes)
        return bytes([raw[0] ^ self.flaw]) + raw[1:]

    def free(self, address: int) -> None:
        self.heap.free(address)
        del self.sizes[address]

    def launch(self, ptx, entry, **shape) -> None:
        allocations = [Allocation(address, nbytes) for address, nbytes in self.sizes.items() if nbytes]
        Machine(self.chip, EmulationOptions(seed=99, schedule="random")).launch(
            ptx, entry, allocations=allocations, **shape
        )


@pytest.fixture
def recorded(tmp_path):
    before, after = b"\0\0\0\0", b"\0\0\x80\x3f"
    Recording(
        "one", "sm_90a", PTX, "test", (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, ((4096).to_bytes(8, "little"),), (4096,),
        ("tensor 1 torch.float32",), (before,), (after,),
    ).save(tmp_path / "one.0.npz")  # fmt: skip
    return tmp_path


def run(monkeypatch, folder, flaw: int, only: str):
    monkeypatch.setattr(compare, "Device", StandIn)
    monkeypatch.setattr(StandIn, "flaw", flaw)
    return CliRunner().invoke(compare.main, [str(folder), "--seeds", "2", "--only", only])


def test_an_equal_chip_agrees(monkeypatch, recorded) -> None:
    result = run(monkeypatch, recorded, 0, "m16n8k16.*f32.bf16|^add|one")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "| on one stand-in (sm_90a) | compared | result |"
    assert "| one.0 | 2 bytes written | same bits |" in lines
    assert any("real operands | 256 sums | same bits" in line for line in lines)
    assert "differ" not in result.output


def test_a_flaw_of_one_bit_is_shown(monkeypatch, recorded) -> None:
    result = run(monkeypatch, recorded, 1, "m16n8k16.*f32.bf16|one")
    assert result.exit_code == 1
    assert "1 chip differs from the ISA's text" in result.output
    assert "tensor 1 torch.float32: 1 of 1 elements differ, by at most 1.2e-07 (largest 1)" in result.output


def test_a_driver_older_than_the_compiler_gets_the_text_as_its_own(monkeypatch) -> None:
    """With the words of a driver for CUDA 13.0 about PTX of a later compiler."""
    device, texts = object.__new__(libcuda.Device), []

    def load(ptx: str):
        texts.append(ptx)
        if len(texts) == 1:
            raise libcuda.CudaError("222: ptxas application ptx input, line 9; fatal   : " + words)
        return ctypes.c_void_p(7)

    monkeypatch.setattr(device, "_load", load)
    words = "Unsupported .version 9.4; current version is '9.0'"
    assert device._loaded("//\n.version 9.4\n.target sm_90a\n// .version 9.4").value == 7
    assert texts[1] == "//\n.version 9.0\n.target sm_90a\n// .version 9.4"
    texts.clear()
    words = "Unexpected instruction types"
    with pytest.raises(libcuda.CudaError, match=words):
        device._loaded(".version 9.4")
