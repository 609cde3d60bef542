"""Base of records that exist only while a kernel is traced, with no run-time values of their own."""

from __future__ import annotations


class Constant:
    """Base of records whose methods are called inside run-time branches and loops.

    The DSL carries every object that may be mutated through a run-time region, as the object's run-time values. A
    constant carries none: its contents are fixed before the region, so the same object leaves the region.
    """

    __slots__ = ()

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list):
        return self
