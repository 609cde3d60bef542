"""Plug-in that `warpcheck_pytest` registers for --emulate: GPU tests of any project on an emulated chip.

The chip exists before collection, so that tests that need a GPU are not skipped. Every launch runs in several orders. A
test with a finding of a severity in --emulate-fail-on fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from warpcheck.context import emulate
from warpcheck.findings import Finding, Findings, Severity
from warpcheck.machine import Checks


class Plugin:
    """Emulated chip of a test session and its findings. option: pytest's options, see `warpcheck_pytest`."""

    def __init__(self, option: Any) -> None:
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
                checks=checks, on_finding="collect", resident=option.emulate_resident, tells_devices_apart=True,
            )
        )  # fmt: skip

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.gpu.take_findings()  # findings of fixtures belong to no test
        try:
            result = yield
        finally:
            found = self._take()
            if found:
                item.add_report_section("call", "findings of the emulator", str(found))
        fatal = found.of(*self.fail_on)
        if fatal:
            pytest.fail(f"the emulator found:\n{fatal}", pytrace=False)
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"findings of the emulator ({self.chip})")
        terminalreporter.write_line(str(self._all_findings()))

    def pytest_unconfigure(self) -> None:
        self._stack.close()
        if self.sarif is not None:
            Path(self.sarif).write_text(self._all_findings().to_sarif() + "\n")

    def _take(self) -> Findings:
        """Findings since the last call."""
        found = self.gpu.take_findings()
        self._found += found
        return found

    def _all_findings(self) -> Findings:
        return Findings.merged(self._found)
