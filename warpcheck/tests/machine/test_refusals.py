"""What a chip or its driver refuses, the emulator refuses: the size of a launch, and registers."""

import pytest
from warpcheck.errors import Deadlock, IllegalInstruction, LaunchRefused, RegisterFileOverflow, UnknownInstruction
from warpcheck.machine import Checks, Machine
from warpcheck_cases.handwritten import BOUNDED, entry, launch


@pytest.mark.parametrize(
    "target, limit",
    [("sm_80", 163), ("sm_89", 99), ("sm_90a", 227), ("sm_100a", 227), ("sm_120a", 99), ("sm_121a", 99)],
)
def test_shared_memory_of_a_block_ends_where_the_chips_does(target, limit):
    launch("", smem=limit * 1024, target=target)
    with pytest.raises(
        LaunchRefused, match=f"{limit * 1024 + 1} bytes of shared memory .*gives a block {limit * 1024}"
    ):
        launch("", smem=limit * 1024 + 1, target=target)


def test_static_shared_memory_counts():
    body = ".shared .align 16 .b8 table[1024];"
    launch(body, smem=226 * 1024)
    with pytest.raises(LaunchRefused, match=r"\(1024 static, 231425 dynamic\)"):
        launch(body, smem=226 * 1024 + 1)


def test_a_chip_that_is_not_modelled():
    with pytest.raises(ValueError, match="chip is 'sm_110a', expected one of sm_80"):
        Machine("sm_110a")


SCALED = (
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0 "
    "{%f0, %f1, %f2, %f3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%f0, %f1, %f2, %f3}, %r10, {0, 0}, %r11, {0, 0};"
)
ALLOCATION = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;"


@pytest.mark.parametrize(
    "instruction, targets, chips",
    [
        ("wgmma.fence.sync.aligned;", ("sm_80", "sm_89", "sm_100a", "sm_103a", "sm_120a"), "sm_90a"),
        (ALLOCATION, ("sm_80", "sm_90a", "sm_120a", "sm_121a"), "sm_100a, sm_103a"),
        (SCALED, ("sm_89", "sm_90a", "sm_100a", "sm_103a"), "sm_120a, sm_121a"),
        (SCALED.replace("mxf8f6f4.block_scale", "f8f6f4").replace(".ue8m0", ""), ("sm_100a",), "sm_120a, sm_121a"),
        ("setmaxnreg.dec.sync.aligned.u32 24;", ("sm_80", "sm_89"), "sm_90a, sm_100a, sm_103a, sm_120a, sm_121a"),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r4, %r5}, [%r2];", ("sm_90a",), "sm_100a, .*sm_121a"),
    ],
)
def test_instructions_of_other_chips(instruction, targets, chips):
    """They are refused at the launch, executed or not: no assembler accepts them for the chip."""
    opcode = instruction.split()[0].rstrip(";")
    for target in targets:
        with pytest.raises(UnknownInstruction, match=f"{target} has no {opcode}; chips that have it: {chips}"):
            launch(f"bra END; {instruction} END:", target=target)


def test_scale_selectors_that_select_nothing():
    launch(SCALED, target="sm_120a")
    with pytest.raises(IllegalInstruction, match="byte 4, thread 0 selects no scale factors of scale_vec::1X, B"):
        launch(SCALED.replace("%r11, {0, 0}", "%r11, {4, 0}"), target="sm_120a")


@pytest.mark.parametrize(
    "old, new",
    [(".block_scale", ""), ("mxf8f6f4", "mxf4"), ("ue8m0", "ue4m3"), ("block_scale", "block_scale.scale_vec::2X"),
     ("f32.e4m3", "f16.e4m3")],
)  # fmt: skip
def test_modifiers_that_do_not_fit_a_scaled_kind(old, new):
    with pytest.raises(UnknownInstruction, match="unknown instruction: mma"):
        launch(SCALED.replace(old, new, 1), target="sm_120a")


def test_threads_and_grid_of_a_launch():
    with pytest.raises(LaunchRefused, match="a block of 1056 threads"):
        launch("", block=1056)
    with pytest.raises(LaunchRefused, match="not a multiple of the cluster"):
        launch("", grid=3, cluster=2)
    with pytest.raises(LaunchRefused, match="a cluster of 8 CTAs needs as many SMs"):
        launch("", grid=8, cluster=8, sms=4)


def test_more_registers_at_launch_than_the_file_has():
    text = entry("", 0).replace("test()", "test() .maxnreg 136 .reqntid 512")
    with pytest.raises(RegisterFileOverflow, match="512 threads of 136 registers at launch; the SM has 65536"):
        Machine("sm_100a").launch(text, "test", grid=(1, 1, 1), block=(512, 1, 1))


# Two warpgroups, 248 registers a thread at launch: `first` runs in one, `second` in the other.
GROUPS = "setp.ge.u32 %p0, %r0, 128; @%p0 bra SECOND; {first} bra DONE; SECOND: {second} DONE:"
DEC, INC = "setmaxnreg.dec.sync.aligned.u32 {};", "setmaxnreg.inc.sync.aligned.u32 {};"


def test_registers_move_between_warpgroups():
    launch(GROUPS.format(first=DEC.format(24), second=INC.format(256)), block=256)


def test_registers_that_nobody_gives_back():
    body = GROUPS.format(first=DEC.format(248), second=INC.format(256))
    with pytest.raises(RegisterFileOverflow, match="nobody gives any back") as caught:
        launch(body, block=256)
    assert "setmaxnreg.inc from 248 to 256 needs 256, the CTA's pool has 0" in str(caught.value)


def test_the_assembler_ignores_setmaxnreg_without_a_bound_of_registers():
    body = GROUPS.format(first=DEC.format(248), second=INC.format(256))
    text = entry(body, 0).replace(BOUNDED, "")
    Machine("sm_100a").launch(text, "test", grid=(1, 1, 1), block=(256, 1, 1))


# Three warpgroups, 168 registers a thread at launch.
THIRDS = """setp.ge.u32 %p0, %r0, 256; @%p0 bra THIRD; setp.ge.u32 %p1, %r0, 128; @%p1 bra SECOND;
    {first} bra DONE; SECOND: {second} bra DONE; THIRD: {third} DONE:"""


def test_a_warpgroup_keeps_more_registers_than_it_asks_for():
    """Counts of flash-attn-4's kernel of dQ and dQv; the second one takes all that the first one gives back."""
    launch(THIRDS.format(first=DEC.format(112), second=INC.format(224), third=INC.format(128)), block=384)
    with pytest.raises(RegisterFileOverflow, match=r"setmaxnreg\.inc from 168 to 232 needs"):
        launch(THIRDS.format(first=DEC.format(112), second=INC.format(232), third=INC.format(128)), block=384)


def test_registers_of_warps_that_complete_a_warpgroup_are_in_the_pool():
    """11 warps start with the 168 of 12: two give back 56 each, the absent one has 168, and four take 56 each."""
    shares = """setp.ge.u32 %p0, %r0, 128; @%p0 bra NEXT; {take} bra DONE;
        NEXT: setp.ge.u32 %p1, %r0, 192; @%p1 bra DONE; {give} DONE:"""
    launch(shares.format(take=INC.format(224), give=DEC.format(112)), block=352)
    with pytest.raises(RegisterFileOverflow, match="nobody gives any back"):
        launch(shares.format(take=INC.format(248), give=DEC.format(112)), block=352)


def test_with_a_declared_count_an_increase_names_more():
    text = entry(INC.format(128), 0).replace("test()", "test() .maxnreg 168 .reqntid 128")
    with pytest.raises(IllegalInstruction, match=r"setmaxnreg\.inc to 128 but the warp has 168"):
        Machine("sm_100a").launch(text, "test", grid=(1, 1, 1), block=(128, 1, 1))


def test_a_hang_before_registers_are_given_back_is_a_deadlock():
    """The consumers starve too, but the one to look at is the producer that never came to its setmaxnreg."""
    with pytest.raises(Deadlock, match="waits for registers"):
        launch(GROUPS.format(first="bar.sync 1, 256;" + DEC.format(24), second=INC.format(256)), block=256)


# Warps 0 and 1, and 2 and 3, of one warpgroup take different branches.
HALVES = "setp.ge.u32 %p0, %r0, 64; @%p0 bra SECOND; {first} bra DONE; SECOND: {second} DONE:"


def test_one_warpgroup_should_not_ask_for_two_counts():
    """Chips so far move the registers of each warp, and kernels that people use lean on it: a letter, no error."""
    with pytest.raises(IllegalInstruction, match="another warp of the warpgroup set") as caught:
        launch(HALVES.format(first=DEC.format(96), second=DEC.format(80)), block=128)
    assert "the other warp" in str(caught.value)


def test_by_the_letter_a_warpgroup_executes_one_setmaxnreg():
    at_two_places = HALVES.format(first=DEC.format(96), second=DEC.format(96))
    launch(at_two_places, block=128)
    with pytest.raises(IllegalInstruction, match="at another instruction than another warp"):
        launch(at_two_places, block=128, checks=Checks(letter=True))
    by_half = HALVES.format(first=DEC.format(96), second="")
    launch(by_half, block=128)
    with pytest.raises(IllegalInstruction, match="executed by 2 of the 4 warps of warpgroup 0 only"):
        launch(by_half, block=128, checks=Checks(letter=True))
    launch(DEC.format(96), block=128, checks=Checks(letter=True))
