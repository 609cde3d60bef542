"""Execution of a plan, the same for every backend: prepare the tensors, allocate the results, launch, combine and sum.

`fa4.runtime.plan` defines the contract of a plan; this package establishes its preconditions.
"""

from .backward import BackwardExecutor, backward
from .forward import ForwardExecutor, forward

__all__ = ["BackwardExecutor", "ForwardExecutor", "backward", "forward"]
