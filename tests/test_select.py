"""The kernel that makes lists of rows, on emulated chips: the lists of torch."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.emulator import emulate
from fa4.sparse.attend import Heads, Pattern
from fa4.sparse.selection import Layout, Rule


@pytest.mark.parametrize(
    ("chip", "rule", "keys", "lists"),
    [
        ("sm_80", Rule(1, False, None), 300_000, 1),  # three bit maps
        ("sm_90a", Rule(4, True, 70), 5000, 2),
        ("sm_100a", Rule(64, True, None), 9000, 4),
        ("sm_120a", Rule(48, False, 3), 5000, 1),
    ],
)
@pytest.mark.parametrize("with_pages", [False, True])
def test_rows_are_those_of_torch(chip, rule, keys, lists, with_pages, seed):
    """In ascending order, each once; lists have blocks twice, none, blocks past the end, and unread entries."""
    gen = torch.Generator().manual_seed(seed)
    batch, queries, blocks = 2, 3, -(-keys // rule.granularity)
    n = min(300, blocks)
    indices = torch.randint(-1, blocks + 3, (batch * queries, lists, n), generator=gen, dtype=torch.int32)
    indices[0, 0] = 2**31 - 1
    counts = torch.randint(0, n + 1, indices.shape[:2], generator=gen, dtype=torch.int32)
    table = used = None
    if with_pages:
        used = torch.tensor([keys, keys // 3], dtype=torch.int32)
        pages = -(-keys // 16)
        table = torch.randperm(batch * pages, generator=gen).int().view(batch, pages)
    layout = Layout(batch, queries, keys, seqused_k=used, page_table=table, page_size=16 if with_pages else None)
    pattern = Pattern(indices, counts, rule, layout)
    heads = Heads(lists, 8, 4)
    expected, count = pattern.rows(0, len(indices), heads, by_kernel=False)
    with emulate(chip, sms=2, seed=seed):
        rows, kept = pattern.rows(0, len(indices), heads, by_kernel=True)
    assert torch.equal(kept, count), f"seed {seed}"
    is_kept = torch.arange(rows.shape[-1]) < kept[..., None]
    assert torch.equal(rows[is_kept], expected[is_kept]), f"seed {seed}"
