"""All problems and faults, by name."""

from tests.emulator.recall import cudnn_frontend, flash_attn_4
from tests.emulator.recall.faults import Fault, Problem

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*flash_attn_4.FAULTS, *cudnn_frontend.FAULTS)}
PROBLEMS: dict[str, Problem] = {fault.problem.name: fault.problem for fault in FAULTS.values()}
