"""Backwards of rows that see 64k keys and more, whole, on the chip that is here."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import fa4
from fa4.oracle.cases import Case
from tests.gpu.offered import needs_gpu, serving
from tests.long_rows import LongRows

pytestmark = needs_gpu
CASES = serving(
    *(
        Case(f"d{dim}_{keys >> 10}k", seqlen_q=130, seqlen_k=keys, heads_q=1, heads_kv=1, head_dim=dim)
        for dim in (128, 192, 256)
        for keys in (1 << 16, 1 << 18, 1 << 20)
    )
)


@pytest.mark.parametrize("backend, case", CASES)
def test_gradients(backend, case, seed):
    rows = LongRows(case, case.seqlen_k)
    problem, saved = rows.make(seed, "cuda")
    leaves = [x.clone().requires_grad_() for x in problem.inputs[:3]]
    try:
        out, lse = fa4.flash_attn_func(*leaves, return_lse=True, backend=backend)
        grads = torch.autograd.grad(out, leaves, problem.dout)
    except fa4.NoBackend as refusal:
        pytest.skip(str(refusal))
    rows.assert_right(problem, saved._replace(out=out.detach(), lse=lse.detach()), (*grads, None), f"seed {seed}")
