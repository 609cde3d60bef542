"""Compilation in other processes: by workers, once for all processes, and while other kernels serve training calls."""

import dataclasses
import subprocess
import sys

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.oracle.cases import Case
from fa4.runtime import background, dispatch, jit, workers
from fa4.runtime.device import chip_by_number, chip_of, emulating
from fa4.runtime.spec import AttentionSpec, ProblemSize
from fa4.torch_ops import run
from tests.building import request
from tests.forget import forget_calls

CHIP = chip_by_number(90)
SPEC = AttentionSpec(torch.bfloat16, 64, 64, 16, 16, 0.125, window_right=0, needs_backward=True)
LONG, SHORT = ProblemSize(4, 8192, 8192), ProblemSize(8, 512, 512)  # with different forward kernels on an H100


def lines(log):
    return log.read_text().splitlines() if log.exists() else []


def test_workers_compile_what_is_missing(tmp_path):
    log, folder, outcomes = tmp_path / "log", tmp_path / "kernels", {}
    folder.mkdir()
    wanted = [request(name, log) for name in "abc"] + [request("d", log, "fails"), request("e", log, "ends")]
    wanted[0].put_into(folder)
    assert wanted[0].is_in(folder) and len(lines(log)) == 1
    workers.compile_all(wanted, folder, 2, lambda request, error: outcomes.update({request.key[0]: error}))
    assert all(outcomes[name] is None for name in "abc") and all(x.is_in(folder) for x in wanted[:3])
    assert outcomes["d"] == "ValueError: no such tile" and "ended" in outcomes["e"]
    assert not any(x.is_in(folder) for x in wanted[3:])
    assert len(lines(log)) == 5 and str(lines(log)[0]) not in lines(log)[1:]  # in other processes


_RANK = """
import sys
from pathlib import Path
from fa4.runtime import background, jit
from tests.building import request
jit.cache_directory = lambda: Path(sys.argv[2])
job = background.Job(request("kernel", sys.argv[1]))
print("ready", flush=True)
job.wait()
"""


def test_ranks_compile_once(tmp_path):
    """In the background: one of three processes starts a worker, and the others wait for its file."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", _RANK, str(log), str(tmp_path)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert all(rank.communicate(timeout=120)[0] == "ready\n" and rank.returncode == 0 for rank in ranks)
    assert len(lines(log)) == 1 and request("kernel", log).is_in(tmp_path)


_WAITING_RANK = """
import sys
from pathlib import Path
from fa4.runtime import jit
from tests.building import request
jit.cache_directory, jit._load = lambda: Path(sys.argv[2]), lambda entry: entry.name
wanted = request("kernel", sys.argv[1])
print(jit.compiled(*wanted), sum(wait.compiled for wait in jit.waits), flush=True)
"""


def test_ranks_whose_calls_wait_compile_once(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", _WAITING_RANK, str(log), str(tmp_path)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    loaded, compiled = zip(*(rank.communicate(timeout=120)[0].split() for rank in ranks))
    assert len(lines(log)) == 1 and len(set(loaded)) == 1 and sorted(compiled) == ["0", "0", "1"]


class Jobs:
    """Stands in for processes: what is compiled is at hand when `finish` is called."""

    def __init__(self, monkeypatch, tmp_path):
        self.at_hand, self.asked = set(), []
        monkeypatch.setattr(background, "_served", {})
        monkeypatch.setattr(background, "_jobs", {})
        monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
        monkeypatch.setattr(jit.Request, "is_at_hand", lambda request: request.full_key in self.at_hand)
        monkeypatch.setattr(background, "Job", self.job)

    def job(self, request):
        jobs = self

        class Job:
            def is_done(self):
                return request.full_key in jobs.at_hand

        self.asked.append(request.key[0])
        return Job()

    def finish(self, plan):
        self.at_hand |= {x.request().full_key for x in plan.both()}


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    forget_calls()
    yield Jobs(monkeypatch, tmp_path)
    forget_calls()


def plan_of(spec, extent):
    return dispatch.select(spec, CHIP).plan(spec, extent, CHIP)


def test_a_kernel_that_is_there_serves_meanwhile(jobs):
    long, short = plan_of(SPEC, LONG), plan_of(SPEC, SHORT)
    assert long.both()[0].cfg != short.both()[0].cfg
    assert background.meanwhile(SPEC, long) is None and jobs.asked == []  # nothing is there: the call waits
    jobs.finish(long)
    interim = background.meanwhile(SPEC, short)
    assert jobs.asked == ["sm90.forward"]  # both have the same backward
    forward, backward = interim.plan.both()
    assert forward.cfg == long.both()[0].cfg and forward.sizes[:2] == (512, 8)
    assert backward is short.both()[1] and interim.plan.forward == forward.launch
    assert short.forward == short.both()[0].launch  # the plan itself is unchanged
    assert background.meanwhile(SPEC, short).jobs == interim.jobs  # one for all calls
    jobs.finish(short)
    assert background.meanwhile(SPEC, short) is None


@pytest.mark.parametrize(
    "changes", [dict(deterministic=True), dict(needs_backward=False), dict(batch_invariant=True)], ids=str
)
def test_calls_that_wait_for_their_own_kernel(jobs, changes):
    spec = dataclasses.replace(SPEC, **changes)
    for extent in (LONG, SHORT):
        plan = plan_of(spec, extent)
        assert background.meanwhile(spec, plan) is None
        jobs.finish(plan)
    jobs.at_hand -= {plan.both()[0].request().full_key}
    assert background.meanwhile(spec, plan) is None and jobs.asked == []


@pytest.mark.parametrize("how", ["variable", "mode", "emulated"])
def test_where_no_call_is_served_meanwhile(jobs, monkeypatch, how):
    jobs.finish(plan_of(SPEC, LONG))
    background.meanwhile(SPEC, plan_of(SPEC, LONG))
    plan = plan_of(SPEC, SHORT)
    if how == "variable":
        monkeypatch.setenv("FA4_BACKGROUND", "0")
    elif how == "emulated":
        plan.chip = dataclasses.replace(CHIP, emulated=True)
    else:
        torch.use_deterministic_algorithms(True)
    try:
        assert background.meanwhile(SPEC, plan) is None and jobs.asked == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_route_changes_its_kernels_once_they_are_there(jobs, monkeypatch):
    launched = []
    monkeypatch.setattr(jit, "compiled", lambda key, *_: lambda *arguments: launched.append(key))
    keys = [plan_of(SPEC, extent).both()[0].request().key for extent in (LONG, SHORT)]
    with emulating(CHIP):
        for extent in (LONG, SHORT, SHORT, SHORT):
            batch, rows, _ = extent
            q, k, v = (torch.empty(batch, rows, 16, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
            out = fa4.flash_attn_func(q, k, v, causal=True, softmax_scale=0.125)
            out.backward(torch.empty_like(out))
            if len(launched) == 6:
                jobs.finish(plan_of(SPEC, SHORT))
            else:
                jobs.finish(plan_of(SPEC, LONG))
    names = [key for key in launched if key[0] == "sm90.forward"]
    assert names == [keys[0], keys[0], keys[0], keys[1]] and jobs.asked == ["sm90.forward"]


def test_a_substitute_computes_the_same(seed):
    """Kernels of long and of short sequences, and of split keys, on a small problem, by the emulator."""
    problem = cases.make(Case("small", seqlen_q=70, seqlen_k=90, heads_q=2, heads_kv=1, head_dim=64, causal=True), seed)
    spec = dataclasses.replace(problem.spec, needs_backward=True)
    with emulate("sm_90a", sms=2, seed=seed):
        chip = chip_of(problem.inputs.q.device)
        row = dispatch.select(spec, chip)
        plan = row.plan(spec, problem.inputs.extent, chip)
        for extent, splits in ((LONG, 1), (SHORT, 1), (SHORT, 3)):
            other = row.plan(dataclasses.replace(spec, num_splits=splits), extent, chip).both()[0]
            serving = plan.with_both(other.for_extent(plan.extent), plan.both()[1])
            assert serving.splits == other.splits == splits
            out, lse = run.forward(problem.inputs, spec, serving)
            cases.assert_right(cases.judge_forward(problem, out, lse), f"{other}, seed {seed}")
