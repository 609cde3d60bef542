"""Constants of the softmax, which is computed in base 2: the hardware has an exp2 instruction."""

import math

LOG2_E = math.log2(math.e)
