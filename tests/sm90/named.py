"""The named cases that the Hopper kernels serve: every backend's, and some of their own."""

import torch

from fa4.oracle import cases
from fa4.oracle.cases import Case
from tests.sm100.named import PACKED_WITH_ALL

# Cases that share dtype, head dims, grouping and flags share one compiled kernel, which is most of a case's time.
EXTRA = (
    Case("half_of_the_last_block", seqlen_q=128, seqlen_k=192, head_dim=128),
    Case("half_block_alone", batch=2, seqlen_q=140, seqlen_k=50, head_dim=128),
    Case("one_team_sees_half", batch=2, seqlen_q=384, seqlen_k=384, head_dim=128, causal=True),
    Case("a_team_sees_nothing", seqlen_q=128, seqlen_k=70, head_dim=128, causal=True),
    Case("many_blocks", seqlen_q=140, seqlen_k=1500, head_dim=128),
    Case("many_laps", batch=3, seqlen_q=300, seqlen_k=300, heads_q=3, heads_kv=3, head_dim=128, causal=True),
    Case("group_of_twelve_is_packed_by_four", seqlen_q=20, seqlen_k=200, heads_q=12, heads_kv=1, causal=True),
    Case("narrow_many", seqlen_q=400, seqlen_k=520),
    Case("fp16_large_logits", seqlen_q=150, seqlen_k=300, dtype=torch.float16, logits=100.0),
    Case("sink_varlen_gqa", lengths=((30, 90), (0, 5), (140, 140)), heads_q=4, sink=True, causal=True),
    PACKED_WITH_ALL,
    Case("seqused_dense", batch=2, seqlen_q=150, seqlen_k=290, seqused=((150, 257), (3, 0)), sink=True),
    Case("head_dim_192", seqlen_q=130, seqlen_k=250, head_dim=192),
    Case("head_dim_192_128_many", batch=2, seqlen_q=300, seqlen_k=300, head_dim=192, head_dim_v=128, causal=True),
    Case("head_dim_256_many", batch=2, seqlen_q=200, seqlen_k=330, head_dim=256),
    Case("head_dim_8", seqlen_q=130, seqlen_k=130, head_dim=8),
    Case("head_dim_v_200", seqlen_q=130, seqlen_k=130, head_dim=64, head_dim_v=200),
    Case("negative_scale", seqlen_q=130, seqlen_k=130, softmax_scale=-0.2, causal=True),
)
CASES = {**cases.CASES, **{case.name: case for case in EXTRA}}
