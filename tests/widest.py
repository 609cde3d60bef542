"""Cases of head dims above 256 that every chip's own kernels run."""

import torch

from fa4.oracle.cases import Case

# Sequences of no query and of no key, of an odd and of an even number of key blocks; ends in the first CTA of a pair,
# in the second and in none; unused rows.
PACKED = Case(
    "packed",
    lengths=((130, 340), (60, 300), (7, 9), (0, 5), (9, 0)),
    seqused=((129, 330), (50, 257), (7, 3), (0, 2), (3, 0)),
    padding=20,
    heads_q=4,
    heads_kv=2,
    causal=True,
    sink=True,
)
NAMED = (
    Case("softcap", seqlen_q=300, seqlen_k=620, head_dim=512, window_size=(350, 60), softcap=15.0),
    Case("no_key", seqlen_q=400, seqlen_k=200, head_dim=320, causal=True, dtype=torch.float16),
    Case("one_query", seqlen_q=1, seqlen_k=700, head_dim=512),
    Case("one_key", seqlen_q=300, seqlen_k=1, head_dim=512),
    Case("logits_1e4", seqlen_q=132, seqlen_k=592, head_dim=512, logits=1e4, causal=True),
    Case("groups_of_three", seqlen_q=50, seqlen_k=300, heads_q=6, heads_kv=2, head_dim=576, head_dim_v=512),
)
