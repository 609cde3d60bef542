"""Softmax is computed in base 2, where the hardware has an exponential."""

import math

LOG2_E = math.log2(math.e)
