"""Records that exist while a kernel is traced and leave nothing behind at run time."""

from __future__ import annotations


class Constant:
    """Base of records whose methods are called inside run-time branches and loops.

    The DSL carries every object it may see mutated through a run-time region and asks it for its run-time values. A
    constant has none to carry: what it holds was fixed before the region, so the same object comes out again.
    """

    __slots__ = ()

    def __get_mlir_types__(self) -> list:
        return []

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list):
        return self
