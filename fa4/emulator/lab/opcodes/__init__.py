"""What single instructions must do, from the text of the PTX ISA: cases for the emulator and for a chip alike."""

from fa4.emulator.lab.opcodes.case import Case, mismatch
from fa4.emulator.lab.opcodes.catalogue import CASES

__all__ = ["CASES", "Case", "mismatch"]
