"""Fixtures shared by every test; fresh memory is poisoned, so that a result nobody wrote cannot look right."""

import functools
import os
import random
import sys

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores; more threads would only get in each other's way.
    torch.set_num_threads(1)


_KERNELS_TO_FREEZE = 4  # some 14,000 objects each
_frozen_kernels = 0


def pytest_configure(config):
    """The plug-in of the emulator has pytest rewrite the assertions of the whole package, 300 files and more: that is
    for plug-ins that judge, and takes longer than to import them."""
    getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("fa4")


def pytest_collection_finish():
    """What all tests imported need not be looked through for tensors at every launch on an emulated chip."""
    memory = sys.modules.get("fa4.emulator.host.memory")
    if memory is not None:
        memory.freeze()


def pytest_runtest_logfinish():
    """Nor need the kernels that were loaded since: after some dozens of them a launch would look for longer than it
    runs."""
    global _frozen_kernels
    machine, memory = (sys.modules.get(f"fa4.emulator.{name}") for name in ("machine.machine", "host.memory"))
    if machine is None or memory is None:
        return
    loaded = machine._load.cache_info().misses
    if not _frozen_kernels <= loaded < _frozen_kernels + _KERNELS_TO_FREEZE:  # fewer: a test emptied the cache
        memory.freeze()
        _frozen_kernels = loaded


_POISON_BYTE = 0x5A  # as int32 1,515,870,810: no length, index or offset of any test


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a fresh tensor with NaN; integers with a pattern that no computation gives, bool with True."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        values = tensor.detach()
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            values.fill_(torch.nan)
        elif tensor.dtype is torch.bool:
            values.fill_(True)
        else:
            values.fill_(int.from_bytes(bytes([_POISON_BYTE]) * tensor.element_size(), "little"))
    return tensor


def _poisoning(allocate):
    @functools.wraps(allocate)
    def allocate_and_poison(*args, **kwargs):
        return poison(allocate(*args, **kwargs))

    return allocate_and_poison


@pytest.fixture(autouse=True)
def _poison_fresh_memory(monkeypatch):
    """`torch.empty` and its like, and the allocation call that fa4.memory makes, give poison in every test."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoning(torch.Tensor.new_empty))
    guards = getattr(torch._C._dynamo, "guards", None)
    if hasattr(guards, "_empty_strided_cuda"):
        monkeypatch.setattr(guards, "_empty_strided_cuda", _poisoning(guards._empty_strided_cuda))


def pytest_addoption(parser):
    group = parser.getgroup("fa4")
    group.addoption(
        "--seed", type=int, help="of every test that draws its data, instead of a fresh one: the one that failed"
    )
    group.addoption("--times", type=int, default=1, help="ask every test that draws its data so often, each time anew")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames and metafunc.config.getoption("--times") > 1:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--times")), indirect=True)


@pytest.fixture
def seed(request) -> int:
    """A fresh seed for each run, or that of `--seed`; printed when the test fails (pytest shows captured output)."""
    given = request.config.getoption("--seed")
    value = random.SystemRandom().randrange(2**31) if given is None else given
    print(f"seed = {value}")
    return value


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """The entries of kernels that calls ask the disk for, none of which is there; what is launched does nothing."""
    from fa4 import dispatch, jit, ops

    entries = []

    def through_disk(directory, full_key, build):
        entries.append(jit._entry(directory, full_key).name)
        return lambda *arguments: None

    def forget():
        dispatch.plan.cache_clear()
        ops._routes.clear()

    forget()
    monkeypatch.setattr(jit, "_through_disk", through_disk)
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    yield entries
    forget()
