"""The mutation runner: which mutants it makes, and that the emulator kills those of a small pipeline."""
# ruff: noqa: E402  (what follows importorskip needs CuTe DSL)

import struct
from dataclasses import fields, replace

import pytest
import torch
from click.testing import CliRunner
from warpcheck.errors import EmulationError
from warpcheck.tools.explained import reason_of
from warpcheck.tools.mutations import Mutant, mutants

from fa4.oracle.cases import CASES

PTX = """\
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry test(.param .u64 out) {
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<4>; .reg .f32 %f<4>;
ld.param.u64 %d0, [out];
mov.u32 %r0, %tid.x;
mov.b32 %r1, smem;
setp.ne.u32 %p0, %r0, 0;
@!%p0 mbarrier.init.shared.b64 [%r1], 2;
fence.mbarrier_init.release.cluster;
bar.sync 0, 64;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 32;
WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 1;
@!%p1 bra WAIT;
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2;
cp.async.bulk.wait_group.read 1;
mov.b32 %r3, 3;
mbarrier.init.shared.b64 [%r1], %r3;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], %r4;
red.release.gpu.global.add.u32 [%d0], 1;
st.global.u32 [%d0], 1;
ret;
}
"""


def test_mutants_of_a_text() -> None:
    lines = PTX.splitlines()
    made = [(m.line, m.kind, m.change, m.ptx.splitlines()[m.line - 1]) for m in mutants(PTX)]
    assert made == [
        (11, "mbarrier init", "expects one arrival more", "@!%p0 mbarrier.init.shared.b64 [%r1], 3;"),
        (11, "mbarrier init", "expects one arrival less", "@!%p0 mbarrier.init.shared.b64 [%r1], 1;"),
        (12, "mbarrier init fence", "removed", "// removed"),
        (13, "CTA barrier", "removed", "// removed"),
        (13, "CTA barrier", "expects one warp less", "bar.sync 0, 32;"),
        (14, "mbarrier expect_tx", "removed", "// removed"),
        (14, "mbarrier expect_tx", "expects 16 bytes more", "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 48;"),
        (14, "mbarrier expect_tx", "expects 16 bytes less", "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;"),
        (15, "mbarrier wait", "removed", "WAIT: setp.eq.u32 %p1, 0, 0;"),
        (15, "mbarrier wait", "waits for the other phase", lines[14].replace("], 1;", "], 0;")),
        (17, "mbarrier wait", "removed", "setp.eq.u32 %p1, 0, 0;"),
        (17, "mbarrier wait", "waits for the other phase", "{ .reg .b32 other_phase; xor.b32 other_phase, %r2, 1; "
         "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], other_phase; }"),
        (18, "group wait", "removed", "// removed"),
        (18, "group wait", "leaves one group more", "cp.async.bulk.wait_group.read 2;"),
        (20, "mbarrier init", "expects one arrival more", "mbarrier.init.shared.b64 [%r1], 4;"),
        (20, "mbarrier init", "expects one arrival less", "mbarrier.init.shared.b64 [%r1], 2;"),
        (21, "mbarrier expect_tx", "removed", "// removed"),
        (21, "mbarrier expect_tx", "expects 16 bytes more", "{ .reg .b32 other; add.s32 other, %r4, 16; "
         "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], other; }"),
        (21, "mbarrier expect_tx", "expects 16 bytes less", "{ .reg .b32 other; add.s32 other, %r4, -16; "
         "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], other; }"),
        (22, "memory order", "relaxed", "red.relaxed.gpu.global.add.u32 [%d0], 1;"),
    ]  # fmt: skip
    for mutant in mutants(PTX):
        others = [line for i, line in enumerate(mutant.ptx.splitlines(), 1) if i != mutant.line]
        assert others == [line for i, line in enumerate(lines, 1) if i != mutant.line]


pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from cutlass.cute.runtime import from_dlpack
from warpcheck.machine import SCHEDULES, Checks
from warpcheck.tools.mutate import (
    Judging,
    Stage,
    count_mutants,
    drawn,
    judge_all,
    main,
    observe,
    prepare,
    reached_mutants,
)
from warpcheck.tools.recording import Recorder, Recording
from warpcheck.tools.verdicts import Ledger, summary
from warpcheck_cases.planted import COLUMNS, ROWS, run_pipeline

from fa4.emulator import emulate
from fa4.emulator import mutate as own


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Recording:
    folder = tmp_path_factory.mktemp("recorded")
    with emulate("sm_100a") as gpu:
        Recorder(gpu, folder, "pipeline")
        run_pipeline(from_dlpack(torch.randn(ROWS, COLUMNS)), from_dlpack(torch.zeros(ROWS, COLUMNS)), "none")
    return Recording.load(folder / "pipeline.0.npz")


def test_every_mutant_of_a_pipeline_is_killed_or_redundant(pipeline: Recording) -> None:
    trial = prepare(pipeline, seeds=3, checks=Checks(leftovers=True))
    verdicts = list(judge_all(trial, reached_mutants(trial)))
    print(summary(pipeline, verdicts))
    kinds = {verdict.mutant.kind for verdict in verdicts}
    assert kinds >= {"mbarrier init", "mbarrier wait", "mbarrier arrive", "CTA barrier"}
    # Redundant in this kernel: the fence (no other CTA, no asynchronous proxy sees the barriers), the producer's wait
    # before the first row (everything is free at the start), the consumers' last arrival (nobody waits for it).
    waits = [v for v in verdicts if v.mutant.kind == "mbarrier wait" and v.mutant.change == "removed"]
    fences = [v for v in verdicts if v.mutant.kind == "mbarrier init fence"]
    arrivals = [v for v in verdicts if v.mutant.kind == "mbarrier arrive"]
    assert [v for v in verdicts if not v.how] == [*fences, waits[0], arrivals[-1]]


def test_unreached_instructions_are_not_counted(pipeline: Recording) -> None:
    trial = prepare(pipeline, seeds=1)
    reached = {mutant.line for mutant in reached_mutants(trial)}
    assert reached <= trial.reached
    assert not reached_mutants(trial, only="no such kind")
    assert {m.kind for m in reached_mutants(trial, only="CTA barrier removed")} == {"CTA barrier"}


def test_the_mutants_of_other_kernels_in_the_text_do_not_count() -> None:
    one = _recording("bar.sync 0;", bytes(4))
    other = ".visible .entry other() { bar.sync 0;\n bar.sync 0;\n ret; }\n"
    assert count_mutants(replace(one, ptx=one.ptx + other)) == count_mutants(one) == 1


def test_a_second_shape_kills_what_the_first_cannot() -> None:
    """The barrier matters only where the loop runs twice; the launches differ in the number of rounds."""
    body = """ld.global.u32 %r3, [%d0]; mov.u32 %r2, 0;
AGAIN: setp.ne.u32 %p0, %r0, 0;
@!%p0 st.shared.u32 [%r1], %r2;
bar.sync 0;
ld.shared.u32 %r4, [%r1];
bar.sync 1;
add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r3;
@%p1 bra AGAIN;"""
    once = _recording(body, struct.pack("<I", 1))
    twice = replace(once, before=(struct.pack("<I", 2),), after=(struct.pack("<I", 2),))
    for recordings, expected in (([once], ""), ([twice], "DataRace"), ([once, twice], "DataRace")):
        trial = prepare(recordings, seeds=1)
        (mutant,) = [m for m in reached_mutants(trial, only="removed") if m.before == "bar.sync 1;"]
        assert trial.judge(mutant).how == expected


def test_shapes_of_two_kernels_are_refused() -> None:
    one = _recording("bar.sync 0;", bytes(4))
    with pytest.raises(ValueError, match="another kernel"):
        prepare([one, _recording("bar.sync 1;", bytes(4))])


REASONS = [
    ("warp barrier", "st.shared.b32 [%r1], 1;\nHERE bar.warp.sync -1;\nelect.sync _|%p1, -1;", "meet"),
    ("warp barrier", "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;\nHERE bar.warp.sync -1;\nst.shared.b32 [%r1], 1;", "meet"),
    ("warp barrier", "HERE bar.warp.sync -1;\nstmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};", "meet"),
    ("warp barrier", "st.shared.b32 [%r1], 1;\nHERE bar.warp.sync -1;\nld.shared.b32 %r3, [%r2];", ""),
    ("warp barrier", "elect.sync _|%p1, -1;\nNEXT:\nHERE bar.warp.sync -1;\nbra NEXT;", ""),
    ("warp barrier", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};\nHERE bar.warp.sync -1;\nret;", ""),
    ("proxy fence", "bar.sync 1, 128;\nld.shared.b32 %r3, [%r2];\nHERE fence.proxy.async.shared::cta;", "reads"),
    ("proxy fence", "bar.sync 1, 128;\nst.shared.b32 [%r2], 1;\nHERE fence.proxy.async.shared::cta;", ""),
    ("proxy fence", "ld.shared.b32 %r3, [%r2];\nHERE fence.proxy.async.shared::cta;", ""),
    ("proxy fence", "fence.proxy.async.global;\nadd.u32 %r1, %r1, 1;\nHERE fence.proxy.async.global;", "another"),
    ("proxy fence", "fence.proxy.async.global;\nst.global.b32 [%d1], 1;\nHERE fence.proxy.async.global;", ""),
    ("wgmma fence", "HERE wgmma.fence.sync.aligned;", "no register"),
    ("proxy fence", "bar.sync 1, 128;\nld.shared.b32 %r3, [%r2];\nHERE fence.proxy.async.global;", ""),
    ("mbarrier wait", "HERE mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;", ""),
    ("mbarrier wait", "HERE mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2, 10000000;", ""),
    ("mbarrier wait", "HERE mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 1, 10000000;", "first use"),
    ("group wait", "HERE wgmma.wait_group.sync.aligned 1;", "products"),
    ("group wait", "HERE cp.async.bulk.wait_group.read 0;", ""),
    ("commit", "HERE wgmma.commit_group.sync.aligned;", "products"),
    ("commit", "HERE cp.async.bulk.commit_group;\nadd.u32 %r1, %r1, 1;\ncp.async.bulk.commit_group;", "along"),
    ("commit", "HERE cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\ncp.async.bulk.commit_group;", ""),
    ("CTA barrier", "elect.sync _|%p1, -1;\nHERE bar.sync 0;", ""),
]


@pytest.mark.parametrize(("kind", "text", "reason"), REASONS)
def test_a_survivor_is_explained_by_what_stands_around_it_or_not(kind: str, text: str, reason: str) -> None:
    lines = text.splitlines()
    (line,) = (number for number, code in enumerate(lines, 1) if code.startswith("HERE"))
    lines = [code.removeprefix("HERE ") for code in lines]
    mutant = Mutant(line, kind, "removed", lines[line - 1], "")
    found = reason_of(mutant, "\n".join(lines))
    assert (reason in found) if reason else not found, found


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["bwd 256x256"]),
        (["--case", "decode", "--case", "window"], ["bwd decode", "bwd window"]),
        (["--seqlen", "30x70", "--case", "window"], ["bwd 30x70", "bwd window"]),
    ],
)
def test_shapes_are_lengths_or_named_cases(arguments: list[str], names: list[str]) -> None:
    given = own.main.make_context("mutate", ["bwd", *arguments]).params
    judged = {field.name for field in fields(Judging)} | {"chip"}
    found = own.cases_of(**{name: value for name, value in given.items() if name not in judged})
    assert [case.name for case in found] == names
    assert [case for case in found if case.window_size != (None, None)] == [
        replace(CASES["window"], name="bwd window") for name in names if name == "bwd window"
    ]


@pytest.mark.parametrize("lengths", ["", "x12", "12x", "12,13", "-5"])
def test_lengths_are_checked(lengths: str) -> None:
    done = CliRunner().invoke(own.main, ["fwd", f"--seqlen={lengths}"])
    assert done.exit_code == 2 and "expected a length such as 256" in done.output


def test_two_processes_agree_with_one(pipeline: Recording) -> None:
    trial = prepare(pipeline, seeds=1)
    chosen = reached_mutants(trial, only="CTA barrier|arrive")
    assert list(judge_all(trial, chosen)) == list(judge_all(trial, chosen, processes=2))


def test_a_larger_sample_goes_on_from_a_smaller_one(pipeline: Recording) -> None:
    reached = reached_mutants(prepare(pipeline, seeds=1))
    assert drawn(reached, None, 1) == reached and drawn(reached, 1000, 1) != reached
    assert drawn(reached, 5, 1) == drawn(reached, 9, 1)[:5] != drawn(reached, 5, 2)
    assert set(drawn(reached, 1000, 1)) == set(reached)


def test_no_run_begins_after_the_limit() -> None:
    survivor = next(mutants(_recording("bar.sync 0;", bytes(4)).ptx))
    assert prepare(_recording("bar.sync 0;", bytes(4)), seeds=4).judge(survivor).runs == 4 * len(SCHEDULES)
    assert prepare(_recording("bar.sync 0;", bytes(4)), seeds=4, seconds=0).judge(survivor).runs == 1


def test_a_second_run_takes_verdicts_from_the_ledger(pipeline: Recording, tmp_path) -> None:
    trial, path = prepare(pipeline, seeds=1), tmp_path / "ledger"
    verdicts = list(judge_all(trial, drawn(reached_mutants(trial), 4, 1)))
    ledger = Ledger(path, ("one shape",))
    assert not any(map(ledger.verdict_of, (v.mutant for v in verdicts)))
    for verdict in verdicts:
        ledger.note(verdict)
    again = Ledger(path, ("one shape",))
    assert [again.verdict_of(verdict.mutant) for verdict in verdicts] == verdicts
    assert Ledger(path, ("another shape",)).verdict_of(verdicts[0].mutant) is None

    pipeline.save(tmp_path / "pipeline.npz")
    command = [str(tmp_path / "pipeline.npz"), "--seeds=1", "--count=3", f"--ledger={tmp_path / 'run'}"]
    first = CliRunner().invoke(main, command)
    kept = (tmp_path / "run").read_text()
    assert first.exit_code == 0 and len(kept.splitlines()) == 3 and "; 3 of " in first.output
    second = CliRunner().invoke(main, command)
    assert (tmp_path / "run").read_text() == kept
    assert first.output.partition("| kind")[2] == second.output.partition("| kind")[2]


def _recording(body: str, before: bytes) -> Recording:
    head = PTX[: PTX.index("setp.ne")]
    return Recording(
        "handwritten", "sm_100a", f"{head}{body}\nret;\n}}\n", "test", (2, 1, 1), (64, 1, 1), (1, 1, 1), 16,
        (struct.pack("<Q", 4096),), (4096,), ("sums",), (before,), (before,),
    )  # fmt: skip


def test_sums_in_any_order_are_judged_by_their_own_spread() -> None:
    body = """mov.u32 %r2, %ctaid.x; mad.lo.u32 %r2, %r2, 64, %r0; cvt.rn.f32.u32 %f0, %r2; rcp.approx.f32 %f0, %f0;
    @!%p0 mov.f32 %f0, 0f3EAAAAAB; bar.sync 0; red.global.add.f32 [%d0], %f0;"""
    recording = _recording("setp.ne.u32 %p0, %r0, 0;\n" + body, bytes(4))
    stage = Stage(recording, sms=4, checks=Checks())
    original = observe(stage, [(seed, schedule) for seed in range(8) for schedule in SCHEDULES])
    (slack,) = original.slack
    assert slack is not None
    value = struct.unpack("<f", original.memory[0])[0]
    assert original.agrees([struct.pack("<f", value + slack / 2)])
    assert not original.agrees([struct.pack("<f", value + 4 * slack)])
    assert not original.agrees([struct.pack("<f", float("nan"))])


def test_a_result_that_depends_on_the_order_is_refused() -> None:
    stage = Stage(
        _recording("mov.u32 %r2, %ctaid.x; atom.exch.global.b32 %r3, [%d0], %r2;", bytes(4)), sms=4, checks=Checks()
    )
    with pytest.raises(ValueError, match="depends on the order"):
        observe(stage, [(seed, schedule) for seed in range(8) for schedule in SCHEDULES])


def test_an_original_with_an_error_is_refused() -> None:
    stage = Stage(_recording("st.global.u32 [%d0+4], %r0;", bytes(4)), sms=4, checks=Checks())
    with pytest.raises(EmulationError):
        observe(stage, [(0, "random")])
