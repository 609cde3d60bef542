"""Machine code: its control bits, its tie to PTX, and the cycles of a warp alone."""

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.host.modules import Modules, fatbins_in, machine_code
from warpcheck.host.stored import register_stored
from warpcheck.timing.code import assembler, cubin
from warpcheck.timing.effects import ProductKind, effect
from warpcheck.timing.issue import _CARRIERS
from warpcheck.timing.sass import Slot, code, cycles_alone, issue_model
from warpcheck.timing.sass.blocks import machine_blocks
from warpcheck.timing.sass.control import Control
from warpcheck.timing.sass.issue import tie
from warpcheck.timing.sass.paths import path_coverage
from warpcheck.timing.sass.pipes import TABLE, rate
from warpcheck.timing.sass.stalls import distances
from warpcheck_cases import small_kernels
from warpcheck_cases.handwritten import entry
from warpcheck_cases.requirements import needs_nvdisasm

from warpcheck import emulate

CHIPS = ("sm_90a", "sm_100a", "sm_120a")


@pytest.fixture(scope="module", params=CHIPS)
def compiled(request, tmp_path_factory):
    return request.param, *small_kernels.compiled(request.param, tmp_path_factory.mktemp("kept"))


def test_machine_code_of_an_emulated_kernel_is_made_when_it_is_asked_for(compiled, tmp_path):
    """From the exported file, long after the compilation, and it is what ptxas makes for a real chip."""
    chip, _, cubin, _ = compiled
    modules = Modules()
    with emulate(chip):
        path = small_kernels.exported(chip, tmp_path)
        register_stored(path, modules)
    (binary,) = fatbins_in(path.read_bytes())
    with pytest.raises(ValueError, match="no cubin"):
        code.cubin_in(binary)
    made = machine_code(modules.ptx_of(binary))
    assert made is not None and code.cubin_in(made) == cubin


def test_control_bits_of_instructions_read_by_hand():
    # LDC R1, c[0x0][0x37c]; SHF.R.U32.HI R2, RZ, 0x5, R42 that waits for S2R's board 2; FMUL with an operand kept.
    assert Control.decode(0x000E620000000800) == Control(1, False, 1, None, 0, 0)
    assert Control.decode(0x004FC8000001162A) == Control(4, True, None, None, 0b100, 0)
    assert Control.decode(0x080FE20000410000) == Control(1, False, None, None, 0, 0b10)


@needs_nvdisasm
def test_every_instruction_is_tied_and_blocks_cover_the_ptx(compiled):
    _, ptx, cubin, entry = compiled
    model = issue_model(ptx, cubin, entry)
    assert model.untied == () and model.coverage.tied == model.coverage.reached == 1.0
    assert [block.start for block in model.blocks[1:]] == [block.stop for block in model.blocks[:-1]]
    assert model.blocks[0].start == 0


@needs_nvdisasm
def test_effects_stand_in_the_block_of_the_ptx_that_has_them(compiled):
    _, ptx, cubin, entry = compiled
    model = issue_model(ptx, cubin, entry)
    kernel = code_of(ptx, entry)
    opcodes = {"MUFU.EX2": "ex2", "SYNCS.ARRIVE": "mbarrier.arrive", "TRYWAIT": "mbarrier.try_wait", "STS": "st.shared"}
    found = set()
    for block in model.blocks:
        for slot in block.slots:
            for machine, meant in opcodes.items():
                if machine in slot.opcode and slot.ptx is not None:
                    assert block.start <= slot.ptx < block.stop
                    assert kernel.instructions[slot.ptx].opcode.startswith(meant)
                    found.add(machine)
    assert found == set(opcodes)


@needs_nvdisasm
def test_a_fat_binary_and_renumbered_ptx_give_the_same(compiled):
    _, ptx, cubin, entry = compiled
    expected = issue_model(ptx, cubin, entry)
    assert issue_model(ptx, b"head of a fat binary" + cubin, entry) == expected
    assert issue_model("// one line more\n" * 7 + ptx, cubin, entry) == expected


@needs_nvdisasm
def test_what_does_not_belong_together_is_refused(compiled):
    _, ptx, cubin, entry = compiled
    with pytest.raises(ValueError, match="was not made from this PTX"):
        issue_model(re.sub(r"ex2\.approx(\.ftz)?\.f32", "sqrt.approx.f32", ptx), cubin, entry)
    with pytest.raises(ValueError, match="entry nothing"):
        issue_model(ptx, cubin, "nothing")
    with pytest.raises(ValueError, match="no ELF header"):
        issue_model(ptx, b"nothing", entry)


@needs_nvdisasm
def test_results_are_waited_for_on_the_board_that_the_bits_name(compiled):
    """What nothing public says of these chips: that the fields are where Volta has them."""
    _, _, cubin, entry = compiled
    function = code.functions(cubin)[entry]
    checked = 0
    for block in range(len(machine_blocks(function))):
        pending = {}
        for i in machine_blocks(function)[block]:
            instruction = function.instructions[i]
            registers = re.findall(r"\bU?R\d+\b", instruction.operands)
            for board in instruction.control.waits:
                pending = {register: on for register, on in pending.items() if on != board}
            assert not pending.keys() & set(registers), f"{instruction} before its operand was waited for"
            if instruction.control.written is not None and registers and not instruction.opcode.startswith("SYNCS"):
                pending[registers[0]] = instruction.control.written
                checked += 1
    assert checked >= 8


@needs_nvdisasm
def test_the_table_knows_every_opcode_of_the_small_kernel(compiled):
    chip, _, cubin, entry = compiled
    opcodes = {instruction.opcode for instruction in code.functions(cubin)[entry].instructions}
    assert [opcode for opcode in opcodes if rate(opcode, chip).pipe == "unknown"] == []


@needs_nvdisasm
def test_what_a_run_is_charged_is_a_path_of_the_machine_code(compiled):
    _, ptx, cubin, entry = compiled
    model = issue_model(ptx, cubin, entry)
    starts = [block.start for block in model.blocks]
    wait = next(i for i, block in enumerate(model.blocks) if any("TRYWAIT" in slot.opcode for slot in block.slots))
    # Once through the loop of a wait that succeeds: not through the branch back to it.
    there = path_coverage(model, [start for i, start in enumerate(starts) if i != wait + 1])
    assert there.instructions > 40 and there.joined == there.instructions
    back = path_coverage(model, reversed(starts))
    assert back.joined < back.instructions / 2


@needs_nvdisasm
def test_no_latency_of_the_table_is_more_than_the_compiler_leaves(compiled):
    chip, _, cubin, entry = compiled
    found = distances(code.functions(cubin)[entry])
    assert len(found) >= 8
    for opcode, clocks in found.items():
        row = rate(opcode, chip)
        # A load of a constant may be known to hit; of exponentials only the last sets a scoreboard.
        if row.pipe not in ("constant", "xu"):
            assert min(clocks) >= row.latency, f"{opcode}: a reader comes after {min(clocks)} clocks"


PRODUCTS = {  # opcode -> type of the mma.sync in PTX, and its kind
    "HMMA.16816.F32.BF16": ("m16n8k16.row.col.f32.bf16.bf16.f32", ProductKind.F16),
    "QMMA.16832.F32.E4M3.E4M3": ("m16n8k32.row.col.f32.e4m3.e4m3.f32", ProductKind.BYTES),
    "QMMA.SF.16832.F32.E4M3.E4M3.E8": (
        "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0", ProductKind.SCALED,
    ),
    "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": (
        "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3", ProductKind.SCALED_4BIT,
    ),
}  # fmt: skip


def products_of(kind, count=16):
    """PTX of a kernel with independent products."""
    scales = ", {a0}, {0, 0}, {a1}, {0, 0}" if "block_scale" in kind else ""
    sums = [", ".join(f"c{4 * i + j}" for j in range(4)) for i in range(count)]
    loads = "".join(f"ld.global.f32 c{i}, [p+{4 * i}];\n" for i in range(4 * count))
    loads += "".join(f"ld.global.b32 a{i}, [p+{4096 + 4 * i}];\n" for i in range(6))
    body = "".join(f"mma.sync.aligned.{kind} {{{c}}}, {{a0, a1, a2, a3}}, {{a4, a5}}, {{{c}}}{scales};\n" for c in sums)
    stores = "".join(f"st.global.f32 [p+{4 * i}], c{i};\n" for i in range(4 * count))
    return f"""
        .version 8.7\n.target sm_120a\n.address_size 64
        .visible .entry test(.param .u64 data)
        {{
        .reg .b64 p; .reg .b32 a<6>; .reg .f32 c<{4 * count}>;
        ld.param.u64 p, [data];
        {loads}{body}{stores}
        ret;
        }}
    """


@needs_nvdisasm
@pytest.mark.skipif(assembler() is None, reason="ptxas is not installed")
@pytest.mark.parametrize("opcode", PRODUCTS)
def test_products_of_consumer_blackwell_are_tied_and_spaced_as_the_table_says(opcode):
    kind, expected = PRODUCTS[opcode]
    ptx = products_of(kind)
    model = issue_model(ptx, cubin(ptx, "sm_120a"), "test")
    kernel = code_of(ptx, "test")
    found = [slot for block in model.blocks for slot in block.slots if slot.opcode == opcode]
    indices = [i for i, instruction in enumerate(kernel.instructions) if instruction.parts[0] == "mma"]
    assert sorted(slot.ptx for slot in found) == indices
    assert {effect(kernel.instructions[i])[2] for i in indices} == {expected}
    assert {slot.pipe for slot in found} == {"tensor"} and {slot.written for slot in found} == {None}
    # Results have no scoreboard: the compiler leaves the latency of the table to the first reader. It issues the next
    # product when the pipe takes it.
    assert rate(opcode, "sm_120a").latency <= min(distances(model.code)[opcode.partition(".")[0]])
    slots = [slot for block in model.blocks for slot in block.slots]
    first, second = (i for i, slot in enumerate(slots) if slot.opcode == opcode and slot.ptx in indices[:2])
    assert sum(max(1, slot.stall) for slot in slots[first:second]) in (15, 16)
    assert all(slot.occupancy == 16 for slot in found)


def code_of(ptx, entry):
    from warpcheck.machine.ptx import parse

    return parse(ptx).kernels[entry]


def slot(opcode, stall=1, wait=0, written=None, read=None, until=None):
    row = rate(opcode, "sm_90a")
    return Slot(row.pipe, stall, wait, written, read, None, opcode, 0, False, row.occupancy, row.latency, until)


# A thread takes over another CTA behind a branch; then all wait.
TAKES_OVER = """
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra WAIT;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2+64], [%r2];
WAIT:
    bar.sync 0;
"""
# Machine code of the second block and the third as one, with predicates: (opcode, guard, PTX instruction).
MERGED = {
    "a vote for a guarded instruction": [
        ("VOTEU.ANY", "", "clusterlaunchcontrol"), ("UGETNEXTWORKID.SELFCAST", "@P0", "clusterlaunchcontrol"),
    ],
    "a spilled register": [("STL.64", "", "bra"), ("UGETNEXTWORKID.SELFCAST", "@P0", "clusterlaunchcontrol")],
}  # fmt: skip


def tied(kernel, instructions):
    """The blocks of PTX with slots. instructions: opcode, guard, and root of the PTX instruction."""
    line_of = {instruction.parts[0]: instruction.line for instruction in kernel.instructions}
    steady = Control(1, False, None, None, 0, 0)
    machine = tuple(
        code.MachineInstruction(16 * i, opcode, guard, "", steady, line_of[of])
        for i, (opcode, guard, of) in enumerate(instructions)
    )
    lines = {instruction.line: [i] for i, instruction in enumerate(kernel.instructions)}
    model = tie(kernel, code.Function("test", machine, frozenset()), lines, "sm_100a")
    return [block for block in model.blocks if block.slots]


@pytest.mark.parametrize("name", MERGED)
def test_merged_blocks_are_issued_where_all_threads_come(name):
    kernel = code_of(entry(TAKES_OVER, 0), "test")
    barrier = next(i for i, instruction in enumerate(kernel.instructions) if instruction.parts[0] == "bar")
    instructions = [*MERGED[name], ("BAR.SYNC", "", "bar"), ("EXIT", "", "ret")]
    (block,) = tied(kernel, instructions)
    assert block.start <= barrier < block.stop and len(block.slots) == len(instructions)


def test_a_branch_at_the_line_of_a_repeated_move_does_not_tell_where_its_block_belongs():
    """The compiler repeats a move of the kernel's start at the end of a loop, and the branch back has its line."""
    kernel = code_of(entry(TAKES_OVER, 0), "test")
    barrier = next(i for i, instruction in enumerate(kernel.instructions) if instruction.parts[0] == "bar")
    (block,) = tied(kernel, [("BAR.SYNC", "", "bar"), ("BRA", "@P0", "mov"), ("EXIT", "", "ret")])
    assert block.start <= barrier < block.stop


# By hand: (slots, clocks at which they issue, clocks until the next could).
ALONE = {
    "stalls add up": ([slot("FADD", 4), slot("FADD", 4), slot("FADD", 5)], [0, 4, 8], 13),
    "exponentials are 8 clocks apart": ([slot("MUFU.EX2"), slot("MUFU.EX2"), slot("FADD")], [0, 8, 9], 10),
    "a reader waits for the board": ([slot("MUFU.EX2", 1, written=0), slot("FADD", 4, wait=1)], [0, 18], 22),
    "a board falls with the last of its loads": (
        [slot("LDS", 1, written=2), slot("LDS", 1, written=2), slot("FADD", 1, wait=0b100)], [0, 1, 29], 30
    ),
    "an older load may be waited for alone": (
        [slot("LDS", 1, written=0), slot("LDS", 1, written=0), slot("DEPBAR.LE", 2, until=(0, 1))], [0, 1, 28], 30
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_cycles_of_a_warp_alone(name):
    slots, issued, cycles = ALONE[name]
    result = cycles_alone(slots)
    assert list(result.issued) == issued and result.cycles == cycles


def test_every_product_of_machine_code_performs_that_of_its_ptx():
    """Those of 8-bit wgmma did so only in their own block of PTX, and a kernel's FLOPs were a half."""
    products = {name.partition(".")[0] for row in TABLE if row.pipe == "tensor" for name in row.opcodes}
    assert {name for name in products if name.endswith("MMA")} <= _CARRIERS
