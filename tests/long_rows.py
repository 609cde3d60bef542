"""Gradients of some keys of rows that see many more: the weights of all are as small as those of a whole such row."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fa4.oracle.cases import Case, Problem, make
from fa4.runtime.spec import Gradients, Saved


@dataclass(frozen=True)
class LongRows:
    """A case whose keys are the share of a row of `keys` that one device has, as in context parallel attention."""

    case: Case
    keys: int

    def make(self, seed: int, device: str = "cpu") -> tuple[Problem, Saved]:
        """The problem and what its backward gets: lse and out of whole rows. There is no gradient of lse."""
        problem = make(self.case, seed, device)
        s = self._scores(problem, torch.float64)
        lse = torch.logsumexp(s, dim=3) + torch.log(torch.tensor(self.keys / s.shape[3]))
        out = torch.randn(problem.dout.shape, generator=torch.Generator().manual_seed(seed)) * self.keys**-0.5
        return problem, Saved(out.to(problem.dout), lse.float(), problem.dout)

    def _scores(self, problem: Problem, dtype: torch.dtype) -> Tensor:
        q, k = (x.transpose(1, 2).to(dtype) for x in problem.inputs[:2])
        k = k.repeat_interleave(problem.spec.group, dim=1)
        s = q @ k.transpose(2, 3) * problem.spec.softmax_scale
        cap = problem.spec.softcap
        return cap * torch.tanh(s / cap) if cap else s

    def by_formula(self, problem: Problem, saved: Saved, precise: bool) -> Gradients:
        """In float64; or in float32, with P and dS rounded as operands of products are, and the results."""
        dtype = torch.float64 if precise else torch.float32

        def rounded(x: Tensor) -> Tensor:
            return x if precise else x.to(self.case.dtype).to(dtype)

        q, k, v, out, do = (x.transpose(1, 2).to(dtype) for x in (*problem.inputs[:3], saved.out, saved.dout))
        k, v = (x.repeat_interleave(problem.spec.group, dim=1) for x in (k, v))
        s = self._scores(problem, dtype)
        p = torch.exp(s - saved.lse.to(dtype)[..., None])
        ds = p * (do @ v.transpose(2, 3) - (do * out).sum(3, keepdim=True))
        if problem.spec.softcap:
            ds = ds * (1 - (s / problem.spec.softcap) ** 2)
        ds, scale = rounded(ds), problem.spec.softmax_scale
        of_keys = ds.transpose(2, 3) @ q * scale, rounded(p).transpose(2, 3) @ do
        grads = ds @ k * scale, *(x.unflatten(1, (-1, problem.spec.group)).sum(2) for x in of_keys)
        return Gradients(*(rounded(x).transpose(1, 2) for x in grads))

    def assert_right(self, problem: Problem, saved: Saved, grads: Gradients, where: str) -> None:
        """Each is off, as a whole, by twice what the same precision is at most."""
        exact, same = (self.by_formula(problem, saved, precise) for precise in (True, False))
        for name, got, wanted, floor in zip(Gradients._fields[:3], grads, exact, same):
            off, allowed = (float((x.double() - wanted).norm() / wanted.norm()) for x in (got, floor))
            assert off <= 2 * allowed, (
                f"{name} of a row of {self.keys} keys: {off:.2e} off, allowed {2 * allowed:.2e}, {where}"
            )


_SHARE = Case("share", seqlen_q=130, seqlen_k=140, heads_q=2, heads_kv=1, head_dim=256)
CASES = {
    f"{case.name}_{keys >> 10}k": LongRows(case, keys)
    for case in (_SHARE, replace(_SHARE, name="capped_192", head_dim=192, softcap=5.0))
    for keys in (1 << 16, 1 << 18, 1 << 20)
}
