"""Emulated machine: it runs PTX on host memory, and returns a report or raises an error.

`ptx` parses the text, `lowering` converts it to the instruction table that `core` (C++) executes, and `Machine` runs
launches. This package depends on no driver and on no vendor's Python package.
"""

from warpcheck.machine.machine import (
    Allocation,
    Launch,
    LaunchReport,
    Machine,
    kernel_of,
    load_core,
    three,
    variables_of,
)
from warpcheck.machine.options import ORDERS, SCHEDULES, Budget, Checks, EmulationOptions, Order, interleavings
from warpcheck.machine.outputs import Output
from warpcheck.machine.record import Part

__all__ = [
    "ORDERS",
    "SCHEDULES",
    "Allocation",
    "Budget",
    "Checks",
    "EmulationOptions",
    "Launch",
    "LaunchReport",
    "Machine",
    "Order",
    "Output",
    "Part",
    "interleavings",
    "kernel_of",
    "load_core",
    "three",
    "variables_of",
]
