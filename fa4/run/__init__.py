"""One road for every backend: prepare the tensors, allocate the results, let the plan launch, join and sum.

`fa4.plan` says what a plan may rely on; here is where it is made true.
"""

from .backward import Backward, backward
from .forward import Forward, forward

__all__ = ["Backward", "Forward", "backward", "forward"]
