"""What single instructions must do, from the text of the PTX ISA: cases for the emulator and for a chip alike."""

from warpcheck_cases.opcodes.case import Case, mismatch
from warpcheck_cases.opcodes.catalogue import CASES

__all__ = ["CASES", "Case", "mismatch"]
