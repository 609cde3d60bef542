"""Table of chips."""

from __future__ import annotations

from dataclasses import dataclass

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class ChipFacts:
    """Properties of a compute capability, and of one GPU that represents it where GPUs of the capability differ.

    From the CUDA C++ Programming Guide (technical specifications per compute capability) and NVIDIA's data sheets.

    number: 10 * major + minor of the compute capability.
    target: CuTe DSL target. "a" targets have instructions of that chip alone; plain ones run on later minor versions
    too.
    sms, smem_per_sm, l2: multiprocessors, and bytes, of `gpu`.
    toolkit: CUDA version of the first build of CuTe DSL whose code for `target` the chip loads.
    """

    number: int
    target: str
    gpu: str
    sms: int
    smem_per_sm: int
    l2: int
    toolkit: int = 12

    @property
    def smem_per_block(self) -> int:
        """Bytes that one block may use: the multiprocessor's, less 1 KiB that every block reserves."""
        return self.smem_per_sm - _KIB


_TABLE = (
    ChipFacts(80, "sm_80", "A100", 108, 164 * _KIB, 40 * _MIB),
    ChipFacts(86, "sm_86", "A40", 84, 100 * _KIB, 6 * _MIB),
    ChipFacts(87, "sm_87", "Orin", 16, 164 * _KIB, 4 * _MIB),
    ChipFacts(89, "sm_89", "RTX 4090", 128, 100 * _KIB, 72 * _MIB),
    ChipFacts(90, "sm_90a", "H100", 132, 228 * _KIB, 50 * _MIB),
    ChipFacts(100, "sm_100a", "B200", 148, 228 * _KIB, 126 * _MIB),
    ChipFacts(103, "sm_103a", "B300", 160, 228 * _KIB, 126 * _MIB),
    # CUDA 12 named Thor sm_101, and CuTe DSL's build for it still emits that name.
    ChipFacts(110, "sm_110a", "Thor", 20, 228 * _KIB, 32 * _MIB, toolkit=13),
    ChipFacts(120, "sm_120a", "RTX 5090", 170, 100 * _KIB, 96 * _MIB),
    ChipFacts(121, "sm_121a", "GB10", 48, 100 * _KIB, 24 * _MIB),
)
CHIPS = {facts.number: facts for facts in _TABLE}
