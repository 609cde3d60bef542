"""Properties of the modelled chips, by the names of their targets."""

from __future__ import annotations

from dataclasses import dataclass

RESERVED_SHARED = 1024  # bytes of every block's shared memory that the system reserves
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class ChipFacts:
    """Properties of a compute capability. Where GPUs of one capability differ, those of `gpu`.

    From the CUDA C++ Programming Guide (technical specifications per compute capability) and NVIDIA's data sheets.

    number: 10 * major + minor of the compute capability.
    smem_per_sm, l2, memory: bytes, of `gpu`.
    """

    number: int
    target: str
    gpu: str
    smem_per_sm: int
    l2: int
    memory: int
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    registers_per_sm: int = 65536
    tmem_columns: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.number, 10)

    @property
    def smem_per_block(self) -> int:
        """Bytes of shared memory that a block may use."""
        return self.smem_per_sm - RESERVED_SHARED


_TABLE = (
    ChipFacts(80, "sm_80", "A100", 164 * _KIB, 40 * _MIB, 80 * _GIB),
    ChipFacts(86, "sm_86", "A40", 100 * _KIB, 6 * _MIB, 48 * _GIB, 1536, 16),
    ChipFacts(89, "sm_89", "RTX 4090", 100 * _KIB, 72 * _MIB, 24 * _GIB, 1536, 24),
    ChipFacts(90, "sm_90a", "H100", 228 * _KIB, 50 * _MIB, 80 * _GIB),
    ChipFacts(100, "sm_100a", "B200", 228 * _KIB, 126 * _MIB, 180 * _GIB, tmem_columns=512),
    ChipFacts(103, "sm_103a", "B300", 228 * _KIB, 126 * _MIB, 270 * _GIB, tmem_columns=512),
    ChipFacts(120, "sm_120a", "RTX 5090", 100 * _KIB, 96 * _MIB, 32 * _GIB, 1536, 24),
    ChipFacts(121, "sm_121a", "GB10", 100 * _KIB, 24 * _MIB, 120 * _GIB, 1536, 24),
)
CHIPS = {facts.target: facts for facts in _TABLE}


def chip_facts(chip: str) -> ChipFacts:
    """Return the properties of `chip`. Raises ValueError, which names the modelled chips."""
    if chip not in CHIPS:
        raise ValueError(f"chip is {chip!r}, expected one of {', '.join(CHIPS)}")
    return CHIPS[chip]
