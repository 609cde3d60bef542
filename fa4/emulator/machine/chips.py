"""What the machine needs to know of a chip: `fa4.device` has what every part of the package asks, this what only a
model of the whole chip does."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.device import chip_by_number

RESERVED_SHARED = 1024  # bytes that the system keeps of every block's shared memory
_REGISTERS = 65536  # of 32 bits, in the register file of every multiprocessor since sm_50


@dataclass(frozen=True, slots=True)
class ChipFacts:
    """One kind of chip; sizes in bytes per multiprocessor or per block as named."""

    name: str
    capability: tuple[int, int]
    smem_per_block: int
    l2: int
    threads_per_sm: int
    blocks_per_sm: int
    memory: int
    registers_per_sm: int = _REGISTERS

    @property
    def number(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    @property
    def smem_per_sm(self) -> int:
        """One block may use all of a multiprocessor's shared memory but what the system keeps of it."""
        return self.smem_per_block + RESERVED_SHARED

    @property
    def has_tensor_memory(self) -> bool:
        return self.capability[0] in (10, 11)


def _facts(number: int, l2_mib: int, memory_gib: int, threads_per_sm: int = 2048, blocks_per_sm: int = 32) -> ChipFacts:
    chip = chip_by_number(number)
    return ChipFacts(
        chip.target, divmod(number, 10), chip.smem_per_block, l2_mib << 20, threads_per_sm, blocks_per_sm,
        memory_gib << 30,
    )  # fmt: skip


# CUDA C++ Programming Guide, technical specifications per compute capability; sizes of L2 and memory of one product.
CHIPS = {
    facts.name: facts
    for facts in (
        _facts(80, 40, 80),
        _facts(86, 6, 48, threads_per_sm=1536, blocks_per_sm=16),
        _facts(89, 72, 48, threads_per_sm=1536, blocks_per_sm=24),
        _facts(90, 50, 80),
        _facts(100, 126, 180),
        _facts(103, 126, 270),
    )
}


def chip_facts(chip: str) -> ChipFacts:
    """The record of `chip`. Raises ValueError naming the known chips."""
    if chip not in CHIPS:
        raise ValueError(f"chip is {chip!r}, expected one of {', '.join(CHIPS)}")
    return CHIPS[chip]
