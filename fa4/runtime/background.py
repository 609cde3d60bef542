"""Training calls need not wait for the compiler: kernels that are there serve them while another process compiles.

A tile table gives some lengths a kernel of their own, but nearly every kernel computes any length (the plan of another
one raises). So if the kernel of a training call must be compiled, and an earlier call of the same spec left another
one, that one serves the call and its equals until the kernel is on disk. Results differ by rounding only. Deterministic
calls always wait for their own kernel. So do calls without gradients, batch-invariant calls, and calls that a CUDA
graph captures.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import disk, env, jit, toolchain, workers
from .device import Chip
from .jit import Request
from .plan import ForwardBackwardPlan, Plan
from .spec import AttentionSpec
from .torch_internals import deterministic_algorithms


class Job:
    """Compilation of a kernel by another process, of this one or of another one on this machine."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._done = threading.Event()
        threading.Thread(target=self._run, name="fa4-compile", daemon=True).start()

    def _run(self) -> None:
        try:
            folder = jit.cache_directory()
            if folder is not None:
                # Of N ranks, one starts a process. The others wait here, in a thread.
                with disk.file_lock(jit.background_lock(folder, self._request)):
                    if not self._request.is_in(folder):
                        with workers.Worker(folder) as worker:
                            worker.compile(self._request)
        except Exception as error:  # the next call compiles it, and then raises what it must
            warnings.warn(f"fa4 could not compile {self._request.key[0]} in the background: {error}", stacklevel=2)
        finally:
            self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    def abandon(self) -> None:
        """Let calls compile the kernel themselves."""
        self._done = threading.Event()
        self._done.set()


class Meanwhile(NamedTuple):
    """A plan that serves calls until jobs are done."""

    plan: Plan
    jobs: tuple[Job, ...]


_jobs: dict[tuple, Job] = {}  # by full key


class _Known(NamedTuple):
    """Plans of a spec, one for each pair of kernels, and the pairs that are at hand."""

    plans: list[ForwardBackwardPlan]
    at_hand: list[tuple]


_served: dict[tuple, _Known] = {}  # by spec, chip and classes of plan and backward
_MAX_SPECS = 1024


def meanwhile(
    spec: AttentionSpec, plan: Plan, beside: Callable[[], Sequence[Request]] = lambda: ()
) -> Meanwhile | None:
    """Return what serves the calls of a plan while its kernels are compiled; None if the calls use the plan at once.
    beside: returns the further kernels of its forward."""
    if not (spec.needs_backward and isinstance(plan, ForwardBackwardPlan)) or not _is_allowed(spec, plan.chip):
        return None
    both = plan.both()
    if len(_served) >= _MAX_SPECS:
        _served.clear()
    known = _served.setdefault((spec, plan.chip, type(plan), type(both[1])), _Known([], []))
    kernels = _kernels(plan)
    if plan.splits == 1 and kernels in known.at_hand:
        return None
    is_all_there = True
    serving, jobs = list(both), list[Job]()
    for i, direction in enumerate(both):
        requests = [direction.request(), *(beside() if i == 0 else ())]
        missing = [request for request in requests if not request.is_at_hand()]
        is_all_there &= not missing
        find = (_other_forward, _other_backward)[i]
        substitute = find(direction, plan, [other.both()[i] for other in known.plans]) if missing else None
        if substitute is not None:
            serving[i] = substitute
            jobs += map(_job, missing)
    if kernels not in map(_kernels, known.plans):
        known.plans.insert(0, plan)
    if is_all_there and kernels not in known.at_hand:
        known.at_hand.append(kernels)
    return Meanwhile(plan.with_both(*serving), tuple(jobs)) if jobs else None


def _is_allowed(spec: AttentionSpec, chip: Chip) -> bool:
    if spec.deterministic or spec.batch_invariant or deterministic_algorithms():
        return False
    if chip.emulated or chip.dry_run is not None or not toolchain.has_compiler():
        return False
    return env.BACKGROUND.get() != "0" and jit.cache_directory() is not None


def _kernels(plan: ForwardBackwardPlan) -> tuple[Any, ...]:
    forward, backward = plan.both()
    return forward.cfg, None if backward.choice is None else backward.choice.row


def _other_forward(forward: Any, plan: ForwardBackwardPlan, others: list[Any]) -> Any:
    """Return a forward of another size, whose kernels are at hand, for the plan's size; or None."""
    for other in sorted(others, key=lambda other: other.splits):
        if other.cfg != forward.cfg and other.request().is_at_hand():
            return other.for_extent(plan.extent)
    return None


def _other_backward(backward: Any, plan: ForwardBackwardPlan, others: list[Any]) -> Any:
    """Return a backward for the plan's size with the tiles of another size, whose kernel is at hand; or None."""
    for other in others:
        if other.choice is None or other.choice.row == backward.choice.row:
            continue
        try:
            found = type(backward)(plan.spec, plan.extent, plan.chip, other.choice.row)
            if found.request().is_at_hand():
                return found
        except (ValueError, LookupError):  # these tiles do not fit this problem
            continue
    return None


def _job(request: Request) -> Job:
    job = _jobs.get(request.full_key)
    if job is None:
        job = _jobs[request.full_key] = Job(request)
    return job


def _after_fork_in_child() -> None:
    """The threads that wait for processes do not exist in the child."""
    for job in _jobs.values():
        job.abandon()
    _jobs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
