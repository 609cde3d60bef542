"""Traced scores and masks, and block masks, on the chip that is here, by every backend that takes them."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4 import dispatch
from fa4.spec import Feature
from tests.gpu.offered import needs_gpu, offered
from tests.mods.kernels import problems
from tests.mods.oracle import assert_kernel_is_right, results_of

pytestmark = needs_gpu


def taking_mods() -> list[str]:
    rows = [row for row in dispatch.BACKENDS if row.name in offered() and Feature.BLOCK_MASK in row.features]
    return list(dict.fromkeys(row.name for row in rows if Feature.BACKWARD in row.features))


@pytest.mark.parametrize("name", [name for name in problems() if name != "packed_and_split"])
@pytest.mark.parametrize("backend", taking_mods())
def test_forward_and_gradients(backend, name, seed):
    problem = problems("cuda")[name]
    assert_kernel_is_right(problem, seed, backend, device="cuda")


@pytest.mark.parametrize("backend", taking_mods())
def test_forward_of_packed_heads_and_split_keys(backend, seed):
    assert_kernel_is_right(problems("cuda")["packed_and_split"], seed, backend, gradients=False, device="cuda")


@pytest.mark.parametrize("name", [name for name, problem in problems().items() if problem.call.get("deterministic")])
@pytest.mark.parametrize("backend", taking_mods())
def test_deterministic_results_repeat_bit_for_bit(backend, name, seed):
    """Of captured tensors too."""
    problem = problems("cuda")[name]
    first, *others = (results_of(problem, seed, backend, device="cuda") for _ in range(20))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other)), f"seed {seed}"
