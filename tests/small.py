"""A few small cases for what torch asks of operators: dense, with a sink, packed, with lengths in use."""

import torch

from fa4.oracle.cases import Case

SMALL = {
    "dense": Case("dense", batch=2, seqlen_q=20, seqlen_k=30, heads_q=4, head_dim=8, causal=True, dtype=torch.float32),
    "sink": Case("sink", seqlen_q=20, seqlen_k=30, head_dim=8, head_dim_v=12, sink=True, dtype=torch.float32),
    "varlen": Case("varlen", lengths=((20, 20), (0, 3), (9, 17)), head_dim=8, causal=True, dtype=torch.float32),
    "seqused": Case(
        "seqused", lengths=((20, 20), (9, 17)), seqused=((13, 20), (9, 5)), head_dim=8, dtype=torch.float32
    ),
}
