"""Ranks of a benchmark, one process for each GPU: their group, times of a run on all of them, and their messages."""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fa4.distributed import group_rank
from fa4.distributed.group_rank import GroupRank, RingExchange

GROUP_LIMIT_S = 90  # a message that takes longer ends the process


def join_group() -> torch.device:
    """Join the group that torchrun describes, and return this process's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # or messages wait for waves of CTAs
    limit = datetime.timedelta(seconds=GROUP_LIMIT_S)
    dist.init_process_group("nccl", device_id=device, pg_options=options, timeout=limit)
    return device


def nccl_version() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agreed_error(error: str) -> str:
    """The error of some rank, if any rank has one: all go on together."""
    return next((e for e in gathered(error) if e), "")


def of_first_rank(value: Any) -> Any:
    """The first rank's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample(run: Callable[[], object], device: torch.device, runs: int = 1) -> float:
    """Milliseconds of a run on this rank, the mean of `runs` in a row, all ranks having begun together."""
    wait(device)
    dist.barrier()
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(runs):
            run()
        return 1000 * (time.perf_counter() - started) / runs
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(runs):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / runs


def passing_gbps(device: torch.device, megabytes: int) -> float | None:
    """GB/s of every rank's sending to the next one and receiving from the one before at once, one direction."""
    if dist.get_world_size() == 1:
        return None
    x = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    times = [sample(lambda: RingExchange((x,), GroupRank.of(None)).wait(), device) for _ in range(8)]
    return x.numel() / statistics.median(times[2:]) / 1e6


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Yield a list of the bytes of each message that this rank's calls of `fa4.distributed` send to other ranks."""
    sent: list[int] = []
    world = dist.get_world_size()
    ring, all_gather, all_to_all = dist.batch_isend_irecv, group_rank._all_gather, dist.all_to_all_single

    def counted_ring(operations):
        sent.extend(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return ring(operations)

    def counted_all_gather(output, x, **options):
        sent.append(x.nbytes * (world - 1))
        return all_gather(output, x, **options)

    def counted_all_to_all(output, x, **options):
        sent.append(x.nbytes * (world - 1) // world)
        return all_to_all(output, x, **options)

    dist.batch_isend_irecv, dist.all_to_all_single = counted_ring, counted_all_to_all
    group_rank._all_gather = counted_all_gather
    try:
        yield sent
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single, group_rank._all_gather = ring, all_to_all, all_gather
