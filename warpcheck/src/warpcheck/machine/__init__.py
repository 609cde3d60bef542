"""The machine: PTX text and memory in, results, a report or an error out.

`ptx` reads the text, `lowering` turns it into the flat table that `core` (C++) runs; `Machine` joins them. It knows no
driver and no Python package of a vendor.
"""

from warpcheck.machine.machine import Allocation, Launch, LaunchReport, Machine, kernel_of, load_core, three
from warpcheck.machine.options import ORDERS, SCHEDULES, Checks, EmulationOptions, Order, interleavings

__all__ = [
    "ORDERS",
    "SCHEDULES",
    "Allocation",
    "Checks",
    "EmulationOptions",
    "Launch",
    "LaunchReport",
    "Machine",
    "Order",
    "interleavings",
    "kernel_of",
    "load_core",
    "three",
]
