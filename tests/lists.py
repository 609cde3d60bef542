"""Problems of the kernels for gradients of lists, on emulated chips, and their judgement against float64."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from warpcheck.machine import SCHEDULES

from fa4.emulator import emulate
from fa4.runtime.spec import Saved
from fa4.sparse import attend, native

NO_ROW = 1 << 30  # stands in lists behind their end


@dataclass(frozen=True)
class Lists:
    """A problem. group: query heads of a key/value head of a list. heads: key/value heads of a list. counts: of the
    lists of all tokens; None for random ones."""

    group: int
    tokens: int = 3
    lists: int = 1
    heads: int = 1
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    has_dlse: bool = True
    counts: tuple[int, ...] | None = None
    rows: int = 260
    longest: int = 200

    def __str__(self) -> str:
        return f"{self.lists}x{self.heads}x{self.group}_{self.head_dim}_{self.head_dim_v}_{str(self.dtype)[6:]}"


@dataclass
class Drawn:
    """Tensors of a problem. Rows of k and v that no list has are NaN."""

    saved: Saved
    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor
    count: Tensor
    scale: float


def draw(case: Lists, seed: int) -> Drawn:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(case.dtype)

    heads = case.lists * case.heads * case.group
    q, dout = normal(case.tokens, heads, case.head_dim), normal(case.tokens, heads, case.head_dim_v)
    k, v = normal(case.rows, case.heads, case.head_dim), normal(case.rows, case.heads, case.head_dim_v)
    lists = [torch.randperm(case.rows, generator=gen)[: case.longest] for _ in range(case.tokens * case.lists)]
    rows = torch.stack(lists).view(case.tokens, case.lists, -1).int()
    count = torch.randint(0, case.longest + 1, (case.tokens, case.lists), generator=gen).int()
    if case.counts is not None:
        count = torch.tensor(case.counts).view_as(count).int()
    is_used = torch.arange(case.longest) < count[..., None]
    rows = torch.where(is_used, rows, NO_ROW)
    unlisted = torch.ones(case.rows, dtype=torch.bool)
    unlisted[rows[is_used].long()] = False
    k[unlisted], v[unlisted] = torch.nan, torch.nan
    drawn = Drawn(Saved(dout, dout, dout, None), q, k, v, rows, count, case.head_dim**-0.5)
    out, lse = torch.zeros(dout.shape, dtype=torch.float64), torch.full((case.tokens, heads), -torch.inf).double()
    for token, part, _, x in each_part(drawn):
        scores = x["q"].double() @ x["k"].double().T * drawn.scale
        lse[token, part] = torch.logsumexp(scores, -1)
        out[token, part] = torch.softmax(scores, -1) @ x["v"].double()
    dlse = torch.randn(lse.shape, generator=gen).masked_fill(lse == -torch.inf, 0.0) if case.has_dlse else None
    drawn.saved = Saved(out.to(case.dtype), lse.float(), dout, dlse)
    return drawn


def each_part(drawn: Drawn):
    """(token, its query heads of a key/value head of a list, (rows, that head), their parts of q, k and v), of lists
    that are not empty."""
    tokens, lists, _ = drawn.rows.shape
    heads = drawn.k.shape[1]
    group = drawn.q.shape[1] // (lists * heads)
    for token in range(tokens):
        for index in range(lists * heads):
            count = int(drawn.count[token, index // heads])
            if count:
                part = slice(index * group, (index + 1) * group)
                keys = drawn.rows[token, index // heads, :count].long(), index % heads
                yield token, part, keys, {"q": drawn.q[token, part], "k": drawn.k[keys], "v": drawn.v[keys]}


def expected(drawn: Drawn, precise: bool) -> tuple[Tensor, ...]:
    """dq, dk and dv in float64, or with the kernel's operands: P and dS rounded, sums in float32."""
    number = torch.float64 if precise else torch.float32
    saved = drawn.saved

    def rounded(x: Tensor) -> Tensor:
        return x if precise else x.to(drawn.q.dtype).to(number)

    dq, dk, dv = (torch.zeros(x.shape, dtype=number) for x in (drawn.q, drawn.k, drawn.v))
    for token, part, keys, x in each_part(drawn):
        q, k, v = (y.to(number) for y in x.values())
        dout, out = (y[token, part].to(number) for y in (saved.dout, saved.out))
        delta = (dout * out).sum(-1)
        if saved.dlse is not None:
            delta = delta - saved.dlse[token, part].to(number)
        p = torch.exp(q @ k.T * drawn.scale - saved.lse[token, part, None].to(number))
        ds = rounded(p * (dout @ v.T - delta[:, None]))
        dq[token, part] = ds @ k * drawn.scale
        dk[keys] += ds.T @ q * drawn.scale
        dv[keys] += rounded(p).T @ dout
    return rounded(dq), dk, dv


def check(
    drawn: Drawn, seed: int, schedule: str, context: str, deterministic: bool = False, *, backend: str, chip: str
) -> list[Tensor]:
    """The kernel's gradients have at most twice the error of the same operands in torch; it adds to sums. Returns dq
    and the sums."""
    gen = torch.Generator().manual_seed(seed)
    dq = torch.full(drawn.q.shape, torch.nan, dtype=drawn.q.dtype)
    before = [torch.randn(x.shape, generator=gen) for x in (drawn.k, drawn.v)]
    sums = [before[0].clone(), before[1].clone()]
    entries = [torch.empty(drawn.rows.numel(), *x.shape[1:]) for x in sums] if deterministic else sums
    with emulate(chip, sms=4, seed=seed, schedule=schedule):
        keys = drawn.k, drawn.v, drawn.rows, drawn.count
        native.backward(backend, drawn.saved, drawn.q, *keys, drawn.scale, dq, entries, deterministic)
        if deterministic:
            attend._add_in_order(sums, drawn.rows, drawn.count, entries)
    exact, same = expected(drawn, precise=True), expected(drawn, precise=False)
    results = dq, *(x - y for x, y in zip(sums, before))
    for name, x, right, reference in zip(("dq", "dk", "dv"), results, exact, same):
        error, allowed = ((y.double() - right).norm() for y in (x, reference))
        assert error <= 2 * allowed, f"{context}, {schedule}, seed {seed}: {name} is {error} off, allowed {2 * allowed}"
    unlisted = drawn.k[:, 0, 0].isnan()
    for x, y in zip(sums, before):
        assert torch.equal(x[unlisted], y[unlisted]), f"{context}, seed {seed}: rows that no list has changed"
    return [dq, *sums]


Check = Callable[..., list[Tensor]]
"""`check` for one chip."""


def check_schedules(of_chip: Check, drawn: Drawn, seed: int, context: str) -> None:
    for schedule in SCHEDULES:
        of_chip(drawn, seed, schedule, context)


def check_equal_bits(of_chip: Check, case: Lists, seed: int) -> None:
    """Deterministic gradients have equal bits under all schedules."""
    drawn = draw(case, seed)
    first, *others = (of_chip(drawn, seed, schedule, str(case), deterministic=True) for schedule in SCHEDULES)
    for other in others:
        assert all(map(torch.equal, first, other)), f"{case}, seed {seed}"


def check_random(of_chip: Check, case: Lists, seed: int, draws: int, longest: int, rows: int, tokens: int) -> None:
    """Many lists for the compiled kernels of a case, with at most so many keys, rows and tokens. One list has several
    keys: with one key a list, dq and dk are 0, and the errors are those of a difference of equal sums."""
    for i in range(draws):
        numbers = random.Random(seed + i)
        keys = numbers.randint(2, longest)
        of_k, of_q = numbers.randint(keys, rows), numbers.randint(1, tokens)
        counts = (keys, *(numbers.randint(0, keys) for _ in range(of_q * case.lists - 1)))
        varied = replace(case, tokens=of_q, counts=counts, rows=of_k, longest=keys)
        of_chip(draw(varied, seed + i), seed + i, SCHEDULES[i % 3], f"{varied}")
