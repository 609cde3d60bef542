"""Instruction time from the machine code: `issue_model` ties a cubin to the PTX that the emulator runs."""

from warpcheck.timing.sass.alone import Alone, cycles_alone
from warpcheck.timing.sass.issue import Block, Coverage, IssueModel, Slot, Untied, issue_model

__all__ = ["Alone", "Block", "Coverage", "IssueModel", "Slot", "Untied", "cycles_alone", "issue_model"]
