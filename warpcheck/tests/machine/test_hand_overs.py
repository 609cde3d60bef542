"""Of a warp's hand-over by one lane the emulator tells the omissions, and nothing of what is right."""

import numpy as np
import pytest
from warpcheck.errors import EmulationError
from warpcheck.machine import Allocation, EmulationOptions, Machine
from warpcheck_cases.hand_overs import KERNELS, HandOver, rows, shape


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_what_is_left_out_is_told(kernel: HandOver, schedule: str, seed: int) -> None:
    out, source = np.zeros(32, np.float32), rows()
    allocations = [Allocation(x.ctypes.data, x.nbytes, name) for x, name in ((out, "out"), (source, "in"))]
    params = [np.uint64(x.ctypes.data).tobytes() for x in (out, source)]

    def launch() -> None:
        machine = Machine("sm_90a", EmulationOptions(seed=seed, schedule=schedule))
        machine.launch(kernel.ptx, kernel.name, **shape(), params=params, allocations=allocations)

    if kernel.right:
        launch()
        assert (out == kernel.expected).all()
    else:
        with pytest.raises(EmulationError, match="data race in shared memory"):
            launch()
