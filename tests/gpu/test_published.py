"""What attention-gym publishes, on the chip that is here, by every backend that takes it."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("attn_gym", reason="attn-gym is among the packages for development")

from tests.gpu.offered import needs_gpu
from tests.gpu.test_mods import taking_mods
from tests.mods.oracle import assert_kernel_is_right
from tests.mods.published import NAMES, problems

pytestmark = needs_gpu


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", taking_mods())
def test_forward_and_gradients(backend, name, seed):
    assert_kernel_is_right(problems("cuda")[name], seed, backend, device="cuda")
