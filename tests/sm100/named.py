"""The named cases that the Blackwell kernels serve, the forward's and the backward's alike; Hopper's too."""

import torch

from fa4.oracle import cases
from fa4.oracle.cases import Case

# Sequences of no query and of no key, rows behind the last one, groups, a sink and a softcap: what packed kernels have,
# in one of them.
PACKED_WITH_ALL = Case(
    "packed_with_all",
    lengths=((30, 90), (0, 5), (9, 0), (140, 140)),
    padding=20,
    heads_q=4,
    sink=True,
    softcap=15.0,
    logits=4.0,
    causal=True,
)
# Beside those of every backend. Cases that share dtype, head dims, grouping and flags share one compiled kernel, which
# is most of a case's time.
EXTRA = (
    Case("one_by_512", seqlen_q=1, seqlen_k=512, head_dim=128),
    Case("512_by_one", seqlen_q=512, seqlen_k=1, head_dim=128),
    Case("many_blocks", seqlen_q=140, seqlen_k=1500, head_dim=128),
    Case("group_of_three_is_not_packed", seqlen_q=90, seqlen_k=300, heads_q=6, heads_kv=2, causal=True),
    Case("group_of_twelve_is_packed_by_four", seqlen_q=70, seqlen_k=200, heads_q=12, heads_kv=1, causal=True),
    Case("fp16_large_logits", seqlen_q=150, seqlen_k=300, dtype=torch.float16, logits=100.0),
    Case("sink_varlen_gqa", lengths=((30, 90), (0, 5), (140, 140)), heads_q=4, sink=True, causal=True),
    PACKED_WITH_ALL,
    Case("seqused_dense", batch=2, seqlen_q=150, seqlen_k=290, seqused=((150, 257), (3, 0)), sink=True),
    Case("head_dim_192_128_many", batch=2, seqlen_q=300, seqlen_k=300, head_dim=192, head_dim_v=128, causal=True),
    Case("head_dim_8", seqlen_q=130, seqlen_k=130, head_dim=8),
    Case("pair", batch=2, seqlen_q=700, seqlen_k=390, head_dim=128),
    Case("pair_rows_end_in_the_first_cta", seqlen_q=300, seqlen_k=90, head_dim=128),
    Case("pair_one_key", seqlen_q=513, seqlen_k=1, head_dim=128),
    Case("negative_scale", seqlen_q=130, seqlen_k=130, softmax_scale=-0.2, causal=True),
)
# Beside those, of the backwards of Hopper and Blackwell, where heads of 128 have tiles of their own.
BACKWARD = (
    Case("logits_1e4", seqlen_q=192, seqlen_k=192, head_dim=128, logits=1e4, causal=True),
    Case("window_gqa", seqlen_q=300, seqlen_k=600, heads_q=2, heads_kv=1, head_dim=128, window_size=(150, 60)),
    Case(
        "window_softcap_gqa",
        seqlen_q=300,
        seqlen_k=600,
        heads_kv=1,
        head_dim=128,
        window_size=(150, 60),
        softcap=15.0,
        logits=4.0,
    ),
    Case("head_dim_104_120", seqlen_q=129, seqlen_k=257, head_dim=104, head_dim_v=120, dtype=torch.float16),
)
CASES = {
    name: case
    for name, case in {**cases.CASES, **{case.name: case for case in EXTRA}}.items()
    if case.head_dim <= 128 or (case.head_dim, case.head_dim_v) == (192, 128)
}
