"""A pytest plug-in: GPU tests of any project that launches CuTe DSL kernels, on an emulated chip.

    pytest --emulate sm_100a --emulate-seeds 5 tests/

The chip is there from before collection on, so that tests that skip themselves without a GPU do not. Every launch is
run in several orders; a test fails when a finding of a severity in --emulate-fail-on came up in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest

# What needs torch is imported when --emulate is given.
_SESSION = pytest.StashKey["_Session"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulate", "CuTe DSL kernels on an emulated GPU (fa4.emulator)")
    group.addoption("--emulate", metavar="CHIP", help="run on an emulated chip: sm_90a, sm_100a, ...")
    group.addoption("--emulate-sms", type=int, default=4, metavar="N", help="its multiprocessors (4)")
    group.addoption("--emulate-seed", type=int, default=0, metavar="N", help="first seed (0)")
    group.addoption("--emulate-seeds", type=int, default=1, metavar="N", help="orders in which each launch is run (1)")
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
    if config.option.emulate is not None:
        try:
            config.stash[_SESSION] = _Session(config)
        except ValueError as error:
            raise pytest.UsageError(f"--emulate: {error}") from None


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(_SESSION, None)
    if session is not None:
        session.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    session = item.config.stash.get(_SESSION, None)
    if session is None:
        return (yield)
    session.gpu.take_findings()  # of fixtures, whose launches belong to no test
    try:
        result = yield
    finally:
        found = session.take()
        if found:
            item.add_report_section("call", "findings of the emulator", str(found))
    fatal = found.of(*session.fail_on)
    if fatal:
        pytest.fail(f"the emulator found:\n{fatal}", pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = config.stash.get(_SESSION, None)
    if session is not None:
        terminalreporter.section(f"findings of the emulator ({session.chip})")
        terminalreporter.write_line(str(session.all_findings()))


class _Session:
    """The emulated chip of a test session, and what was found on it."""

    def __init__(self, config: pytest.Config) -> None:
        from fa4.emulator.context import emulate
        from fa4.emulator.findings import Finding, Severity
        from fa4.emulator.machine import Checks

        option = config.option
        self.chip: str = option.emulate
        self.fail_on = [Severity(severity) for severity in option.emulate_fail_on or ["error"]]
        self.sarif: str | None = option.emulate_sarif
        self._found: list[Finding] = []
        checks = Checks(
            letter=option.emulate_letter, leftovers=option.emulate_leftovers, off=frozenset(option.emulate_off)
        )
        self._stack = contextlib.ExitStack()
        self.gpu = self._stack.enter_context(
            emulate(
                self.chip, sms=option.emulate_sms, seed=option.emulate_seed, seeds=option.emulate_seeds,
                checks=checks, on_finding="collect", tells_devices_apart=True,
            )
        )  # fmt: skip

    def take(self) -> Any:
        """Findings since the last call."""
        found = self.gpu.take_findings()
        self._found += found
        return found

    def all_findings(self) -> Any:
        from fa4.emulator.findings import Findings

        return Findings.merged(self._found)

    def close(self) -> None:
        self._stack.close()
        if self.sarif is not None:
            from pathlib import Path

            Path(self.sarif).write_text(self.all_findings().to_sarif() + "\n")
