"""The named cases on a cache, each with what it is for."""

import torch

from .problem import CacheCase

_ALL = (
    # Without pages.
    CacheCase("dense_ragged", (0, 1, 37, 160), heads_q=4),
    CacheCase("dense_append", (0, 5, 63, 64), new=1, heads_q=8),
    CacheCase("batch_idx", (9, 0, 70), new=2, queries=2, batch_idx=True),
    CacheCase("leftpad", (20, 64, 33), leftpad=(3, 64, 0), queries=3, causal=False),
    CacheCase("leftpad_and_batch_idx", (50, 30), new=3, queries=3, leftpad=(7, 30), batch_idx=True, window_size=(9, 0)),
    CacheCase("rotary_halves", (11, 0, 90), new=4, queries=4, rotary="halves", head_dim=64),
    CacheCase("rotary_interleaved", (11, 0, 90), new=4, queries=4, rotary="interleaved", rotary_dim=64),
    CacheCase("rotary_without_mask", (30, 4), new=2, queries=5, rotary="halves", causal=False),
    CacheCase("rotary_elsewhere", (30, 4), new=2, queries=2, rotary="interleaved", rotary_seqlens=(100, 7)),
    # Pages: from one row to more than a tile, borders within and at the end of tiles.
    CacheCase("pages_of_1", (0, 1, 50, 131), page_size=1, heads_q=4),
    CacheCase("pages_of_16", (16, 17, 0, 150), page_size=16, heads_q=6, heads_kv=2),
    CacheCase("pages_of_64", (64, 65, 1, 300), page_size=64, capacity=320),
    CacheCase("pages_of_128", (300, 128, 0), page_size=128, capacity=384, heads_q=4),
    CacheCase("pages_of_256", (300, 256, 3), page_size=256, capacity=512),
    CacheCase("pages_of_7", (6, 7, 8, 100), page_size=7, capacity=105, causal=False),
    CacheCase("append_at_page_borders", (15, 16, 31, 0), new=2, queries=2, page_size=16),
    CacheCase("append_whole_pages", (0, 16), new=48, queries=48, page_size=16, heads_q=2, heads_kv=2),
    CacheCase("append_and_rotate_in_pages", (15, 40), new=3, queries=3, page_size=16, rotary="halves"),
    CacheCase("leftpad_in_pages", (40, 100, 20), leftpad=(5, 64, 20), page_size=16, queries=2),
    CacheCase("leftpad_in_large_pages", (140, 100), leftpad=(5, 99), page_size=128, capacity=256, queries=2),
    CacheCase("shared_prefix", (70, 65, 120), page_size=16, shared=4, queries=2),
    CacheCase("window_in_pages", (130, 60), page_size=16, window_size=(30, 0), queries=3),
    CacheCase("softcap_and_sink_in_pages", (130, 0, 60), page_size=16, softcap=10.0, sink=True, heads_q=16),
    CacheCase("chunked_prefill", (200, 90), new=70, queries=70, page_size=64, capacity=320, heads_q=4),
    CacheCase("chunk_in_large_pages", (130, 250), new=70, queries=70, page_size=128, capacity=384, head_dim=128),
    CacheCase("more_rows_than_a_tile", (100,), queries=80, page_size=16, heads_q=2, heads_kv=2),
    CacheCase("head_dims", (90, 33), page_size=16, head_dim=72, head_dim_v=40, queries=2),
    CacheCase("head_dim_128", (90, 33), page_size=16, head_dim=128, heads_q=8, heads_kv=2, dtype=torch.float16),
    CacheCase("head_dim_256", (90, 33), page_size=16, head_dim=256),
    CacheCase("negative_scale", (90, 33), page_size=16, softmax_scale=-0.2),
    # Packed queries.
    CacheCase("packed_queries", (90, 0, 33, 7), queries=(1, 3, 0, 7), page_size=16, heads_q=4),
    CacheCase("packed_queries_dense_cache", (90, 33), queries=(4, 1), batch_idx=True, sink=True),
    CacheCase("packed_append", (15, 0, 33), queries=(2, 0, 5), new=(2, 0, 5), page_size=16, rotary="interleaved"),
    # Numbers of 8 bits.
    CacheCase("fp8_tensor", (90, 0, 33), fp8="tensor", heads_q=4),
    CacheCase("fp8_heads_in_pages", (90, 0, 33), page_size=16, fp8="heads", heads_q=8, heads_kv=2),
    CacheCase("fp8_zeros", (90, 0, 33), page_size=16, fp8="a head of zeros", heads_q=8, heads_kv=2),
    CacheCase("fp8_append", (31, 16), new=3, queries=3, page_size=16, fp8="both", heads_kv=2),
    CacheCase("fp8_append_and_rotate", (15, 40), new=3, queries=3, page_size=16, fp8="heads", rotary="halves"),
    CacheCase("fp8_float16", (90, 33), fp8="both", dtype=torch.float16, head_dim=48, head_dim_v=32, sink=True),
    CacheCase("fp8_softcap", (90, 33), page_size=64, capacity=192, fp8="both", softcap=5.0, head_dim=128),
    CacheCase("fp8_chunk", (200, 90), new=70, queries=70, page_size=64, capacity=320, heads_q=4, fp8="heads"),
    CacheCase("fp8_pages_of_1", (90, 0, 33), page_size=1, fp8="heads", heads_q=4, queries=2),
    CacheCase("fp8_leftpad_in_pages", (40, 100, 20), leftpad=(5, 64, 20), page_size=16, fp8="both", head_dim=128),
    CacheCase(
        "fp8_leftpad_in_large_pages", (140, 100), leftpad=(5, 99), page_size=128, capacity=256, fp8="both", head_dim=256
    ),
    CacheCase("int8_heads_in_pages", (90, 0, 33), page_size=16, fp8="heads", int8=True, heads_q=8, heads_kv=2),
    CacheCase(
        "int8_append_and_rotate", (15, 40), new=3, queries=3, page_size=16, fp8="both", int8=True, rotary="halves"
    ),
    CacheCase(
        "int8_float16_chunk",
        (200, 90),
        queries=70,
        capacity=320,
        fp8="tensor",
        int8=True,
        dtype=torch.float16,
    ),
    CacheCase("wide_pages_of_3", (90, 33), page_size=3, capacity=120, head_dim=256),
    CacheCase("chunk_in_pages_of_5", (200, 90), new=70, queries=70, page_size=5, capacity=320, heads_q=4),
    CacheCase("fp8_wide", (90, 200), page_size=128, capacity=256, fp8="both", head_dim=256, queries=2),
    CacheCase("fp8_rows_elsewhere", (50, 30, 0), leftpad=(7, 30, 0), batch_idx=True, fp8="heads", queries=(1, 5, 2)),
    CacheCase(
        "fp8_chunk_in_pages_of_5", (200, 90), new=70, queries=70, page_size=5, capacity=320, head_dim_v=80, fp8="heads"
    ),
    CacheCase(
        "fp8_chunk_elsewhere",
        (200, 90, 70),
        queries=70,
        capacity=320,
        heads_q=4,
        head_dim=48,
        head_dim_v=80,
        leftpad=(7, 90, 0),
        batch_idx=True,
        fp8="both",
    ),
    CacheCase(
        "rows_of_656_bytes",
        (31, 16),
        new=3,
        queries=3,
        page_size=16,
        heads_q=4,
        head_dim=576,
        head_dim_v=512,
        fp8="rows",
        in_k=True,
        sink=True,
    ),
    # NVFP4.
    CacheCase("nvfp4_dense", (90, 0, 33), fp8="nvfp4", heads_q=4),
    CacheCase("nvfp4_in_pages", (90, 0, 33), page_size=16, fp8="nvfp4", heads_q=8, heads_kv=2, head_dim=128),
    CacheCase("nvfp4_append", (31, 16), new=3, queries=3, page_size=16, fp8="nvfp4", heads_kv=2),
    CacheCase("nvfp4_append_and_rotate", (15, 40), new=3, queries=3, page_size=16, fp8="nvfp4", rotary="halves"),
    CacheCase(
        "nvfp4_float16", (90, 33), fp8="nvfp4", dtype=torch.float16, head_dim=96, head_dim_v=32, sink=True, softcap=5.0
    ),
    CacheCase("nvfp4_chunk", (200, 90), new=70, queries=70, page_size=64, capacity=320, heads_q=4, fp8="nvfp4"),
    CacheCase("nvfp4_pages_of_1", (90, 0, 33), page_size=1, fp8="nvfp4", heads_q=4, queries=2),
    CacheCase("nvfp4_leftpad", (40, 100, 20), leftpad=(5, 64, 20), page_size=16, fp8="nvfp4", head_dim=128),
    CacheCase("nvfp4_wide", (90, 200), page_size=128, capacity=256, fp8="nvfp4", head_dim=256, queries=2),
    CacheCase("nvfp4_rows_elsewhere", (50, 30, 0), leftpad=(7, 30, 0), batch_idx=True, fp8="nvfp4", queries=(1, 5, 2)),
    CacheCase("nvfp4_packed_append", (15, 0, 33), queries=(2, 0, 5), new=(2, 0, 5), page_size=5, fp8="nvfp4"),
    CacheCase("nvfp4_shared_prefix", (70, 65, 120), page_size=16, shared=4, queries=2, fp8="nvfp4"),
    CacheCase("nvfp4_window", (300, 60), page_size=8, capacity=320, window_size=(130, 0), fp8="nvfp4", sink=True),
    CacheCase("nvfp4_narrow", (90, 33), page_size=16, fp8="nvfp4", head_dim=48, head_dim_v=16),
    CacheCase("fp8_window_and_sink", (300, 60), page_size=8, capacity=320, window_size=(130, 0), fp8="both", sink=True),
)
CASES = {case.name: case for case in _ALL}
