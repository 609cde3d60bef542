"""What single instructions must do, from the text of the PTX ISA: cases that run on the emulator and on a chip alike."""

from fa4.emulator.opcodes.case import Case, mismatch
from fa4.emulator.opcodes.catalogue import CASES

__all__ = ["CASES", "Case", "mismatch"]
