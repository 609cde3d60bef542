"""Lowering of parsed instructions to the core's table: `lower` holds the classes, the other modules the opcodes."""

from warpcheck.machine.lowering import alu, asynchronous, memory  # noqa: F401  (they register their handlers)
from warpcheck.machine.lowering.lower import SHARED_RESERVED, Lowering

__all__ = ["SHARED_RESERVED", "Lowering"]
