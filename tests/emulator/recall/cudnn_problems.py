"""Calls of nvidia-cudnn-frontend that show the faults."""

from __future__ import annotations

import functools

from tests.emulator.public import cudnn_attention as attention
from tests.emulator.public import cudnn_sparse as sparse
from tests.emulator.recall.faults import Package, Problem

PACKAGE = Package("nvidia-cudnn-frontend", "1.32.0", "cudnn")

D128 = Problem(PACKAGE, "forward d128, lengths", "sm_100a",
               functools.partial(attention.forward, 4, 300, (300, 0, 100, 257), 128), sms=2)  # fmt: skip
D512 = Problem(PACKAGE, "forward d512, lengths", "sm_100a",
               functools.partial(attention.forward, 1, 200, (200, 0, 100), 512))  # fmt: skip
DECODE_D128 = Problem(PACKAGE, "decode d128", "sm_100a", functools.partial(attention.decode, 128), sms=1)
DECODE_D256 = Problem(PACKAGE, "decode d256", "sm_100a", functools.partial(attention.decode, 256))
E4M3 = Problem(PACKAGE, "forward d256 e4m3, causal", "sm_100a", attention.e4m3)
D192 = Problem(PACKAGE, "forward d192, few keys", "sm_100a", attention.short_and_empty, sms=2)
BACKWARD = Problem(PACKAGE, "backward d512, clusters of four", "sm_100a", functools.partial(attention.gradients, 4097))
INDEXER = Problem(PACKAGE, "indexer backward", "sm_100a", sparse.indexer)
INDEXER_90 = Problem(PACKAGE, "indexer backward, sm_90a", "sm_90a", sparse.indexer)
DENSE_INDEXER = Problem(PACKAGE, "dense indexer backward", "sm_100a", sparse.dense_indexer)
SPARSE = Problem(PACKAGE, "sparse backward d576", "sm_100a", functools.partial(sparse.sparse_backward, 576))
SPARSE_FREED = Problem(PACKAGE, "sparse backward d576, leftovers", "sm_100a", SPARSE.run, leftovers=True)
