"""The options of the emulator's pytest plug-in, and the plug-in itself where --emulate is given.

    pytest --emulate sm_100a --emulate-seeds 5 tests/

pytest loads the plug-ins of every installed package in every run. This module lies outside of the package, so that a
run without --emulate imports neither NumPy nor torch. `-p warpcheck_pytest` loads it from a checkout.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # pytest rewrites the assertions of all files of a package that has a plug-in. These files have none for users.
    rewritten = getattr(getattr(pluginmanager, "rewrite_hook", None), "_must_rewrite", None)
    if isinstance(rewritten, set):
        rewritten.difference_update(("warpcheck", "warpcheck_pytest"))
    group = parser.getgroup("emulate", "CuTe DSL kernels on an emulated GPU (warpcheck)")
    group.addoption("--emulate", metavar="CHIP", help="run on an emulated chip: sm_90a, sm_100a, ...")
    group.addoption("--emulate-sms", type=int, default=4, metavar="N", help="its multiprocessors (4)")
    group.addoption("--emulate-seed", type=int, default=0, metavar="N", help="first seed (0)")
    group.addoption("--emulate-seeds", type=int, default=1, metavar="N", help="orders in which each launch is run (1)")
    group.addoption(
        "--emulate-resident", type=int, metavar="N",
        help="clusters or CTAs that run at a time; 0: as many as fit (1 with an odd seed, else as many as fit)",
    )  # fmt: skip
    group.addoption("--emulate-letter", action="store_true", help="hold kernels to the letter of the ISA")
    group.addoption("--emulate-leftovers", action="store_true", help="no CTA may end with something under way")
    group.addoption("--emulate-off", action="append", default=[], metavar="KIND", help="a kind that is not told")
    group.addoption(
        "--emulate-fail-on", action="append", default=None, metavar="SEVERITY",
        help="error, letter, redundant or leftover: fails the test in which it was found; may be repeated (error)",
    )  # fmt: skip
    group.addoption("--emulate-sarif", metavar="FILE", help="write all findings as SARIF")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.emulate is None:
        return
    from warpcheck.pytest_plugin import Plugin

    try:
        plugin = Plugin(config.option)
    except ValueError as error:
        raise pytest.UsageError(f"--emulate: {error}") from None
    config.pluginmanager.register(plugin, "warpcheck-emulate")
