"""Fixtures shared by every test; fresh memory is poisoned, so that a result nobody wrote cannot look right."""

import collections
import datetime
import itertools
import os

import pytest
import torch

from tests.poisoned import fresh_memory_is_poison

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers already fill the cores; more threads would only get in each other's way.
    torch.set_num_threads(1)


def pytest_addoption(parser, pluginmanager):
    """The plug-in of warpcheck's tests, which may run in the same session, and what chooses rotating tests."""
    pluginmanager.import_plugin("warpcheck_cases.suite")
    help = "of each module whose tests rotate, run a part only: `today` for another one each day, or its number"
    parser.addoption("--part", default=None, metavar="PART", help=help)


def pytest_configure(config):
    """Once for all workers, which get the options of the process that starts them."""
    if config.option.part == "today":
        config.option.part = datetime.date.today().toordinal()


def pytest_report_header(config):
    return None if config.option.part is None else f"rotating tests: --part={config.option.part}"


def pytest_collection_modifyitems(config, items):
    """Keep a stretch of the tests of a module that rotate in the same number of parts: neighbours share kernels."""
    if config.option.part is None:
        return
    part, chosen = int(config.option.part), []
    for _, module in itertools.groupby(items, key=lambda item: item.path):
        tests = list(module)
        rotating = collections.defaultdict(list)
        for item in tests:
            if marker := item.get_closest_marker("rotates"):
                rotating[marker.args[0]].append(item)
        left_out = set()
        for parts, group in rotating.items():
            first, stop = (len(group) * (part % parts + i) // parts for i in (0, 1))
            left_out |= {id(item) for item in group[:first] + group[stop:]}
        chosen += [item for item in tests if id(item) not in left_out]
    kept = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen


@pytest.fixture(autouse=True)
def _poison_fresh_memory():
    """In every test."""
    with fresh_memory_is_poison():
        yield


@pytest.fixture(scope="session")
def disassembler():
    try:
        from warpcheck.timing.sass.code import nvdisasm

        nvdisasm()
    except (ImportError, FileNotFoundError):
        pytest.skip("reads machine code by nvdisasm, of the package nvidia-cuda-nvdisasm")


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """The entries of kernels that calls ask the disk for, none of which is there; what is launched does nothing."""
    from fa4.runtime import jit
    from tests.forget import forget_calls

    entries = []

    def through_disk(directory, full_key, build, names):
        entries.append(jit._entry(directory, full_key).stem)
        return lambda *arguments: None

    forget_calls()
    monkeypatch.setattr(jit, "_through_disk", through_disk)
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    yield entries
    forget_calls()
