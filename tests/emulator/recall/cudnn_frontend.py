"""nvidia-cudnn-frontend: synchronisation that its pull requests added, or whose need its comments explain."""

from __future__ import annotations

from examples.findings.edited_package import Edit, Removal
from tests.emulator.recall.cudnn_problems import (
    BACKWARD,
    D128,
    D192,
    D512,
    DECODE_D128,
    DECODE_D256,
    DENSE_INDEXER,
    E4M3,
    INDEXER,
    INDEXER_90,
    SPARSE,
    SPARSE_FREED,
)
from tests.emulator.recall.faults import Fault

_FORWARD = "sdpa/fwd/kernels/sm100/"
_D128, _D512, _D192, _E4M3 = (
    f"{_FORWARD}prefill_{name}.py" for name in ("d128_f16", "d512_f16_2x2", "d192_d128_f16", "d256_fp8")
)
_DECODE_D128, _DECODE_D256 = (f"{_FORWARD}decode_{name}.py" for name in ("d128_f16", "d256_f16"))
_BACKWARD = "sdpa/bwd/kernels/sm100/bprop_d512_f16.py"
_INDEXER, _INDEXER_90, _DENSE = (
    f"deepseek_sparse_attention/indexer_backward/{name}.py"
    for name in ("indexer_backward_sm100", "indexer_backward_sm90", "dense_indexer_backward_sm100")
)
_SPARSE = "deepseek_sparse_attention/sparse_attention_backward/dsa_bwd_sm100.py"

FAULTS: tuple[Fault, ...] = (
    Fault("d128 stats read", D128, f"{_D128}:1982", "the MMA warp does not wait until statistics are read",
          (Removal(_D128, "mb_stats_read", (1975, 1976, 1987, 1994)),)),
    Fault("d128 phase flip", D128, f"{_D128}:3415", "no flip of a phase after the epilogue of a tile",
          (Removal(_D128, "bmm2_done_phase", (3418,)),)),
    Fault("d128 O proxy fence", D128, f"{_D128}:3408", "no proxy fence between O in shared memory and its TMA store",
          (Removal(_D128, "fence_proxy", (3409,)),)),
    Fault("d128 slot 0 for both", D128, "#1532", "both softmax warpgroups wait for the O slot of the first",
          (Edit(_D128, "mb_o_empty[sub_tile_id]", "mb_o_empty[0]"),)),
    Fault("d128 O slot of a tile", D128, f"{_D128}:2804", "no wait for the O slot at the start of a tile",
          (Removal(_D128, "mb_o_empty", (2812,)),)),
    Fault("d128 base of tensor memory", D128, f"{_D128}:3068",
          "correction warps do not wait until the base of tensor memory is published",
          (Edit(_D128, "barrier_cta_sync(barrier_id=2, thread_count=", "barrier_cta_arrive(2, "),)),
    Fault("d512 statistics columns", D512, f"{_D512}:275", "one pair of statistics columns for all ring slots",
          (Edit(_D512, " + stat_state.idx * cutlass.Int32(LAYOUT.STATS_COLS_PER_SLOT)", "", 2),)),
    Fault("d512 second barrier of the sums", D512, f"{_D512}:1680", "no barrier after the exchange of the sums",
          (Removal(_D512, "barrier_cta_sync", (1692,)),)),
    Fault("d512 alias of O and V", D512, f"{_D512}:969", "V is loaded over O that the TMA still stores",
          (Removal(_D512, "mb_o_empty", (974,)),)),
    Fault("d512 last arrival of the twin", D512, f"{_D512}:1068", "a CTA may end before the arrival of its twin",
          (Removal(_D512, "mb_o_empty", (1073,)),)),
    Fault("d512 drain of K and V", D512, f"{_D512}:1060", "no wait for the last consumers of K and V at the end",
          (Removal(_D512, "_empty", (1064, 1067, 1069)),)),
    Fault("decode d128 stats read", DECODE_D128, f"{_DECODE_D128}:1273",
          "the MMA warp does not wait until statistics are read",
          (Removal(_DECODE_D128, "mb_stats_read", (1269, 1278)),)),
    Fault("decode d256 last product", DECODE_D256, f"{_DECODE_D256}:796", "O is read before the last product has ended",
          (Removal(_DECODE_D256, "mb_bmm2_done", (798,)),)),
    Fault("decode d256 product before", DECODE_D256, f"{_DECODE_D256}:770",
          "O is rescaled before the product before has ended", (Removal(_DECODE_D256, "mb_bmm2_done", (774,)),)),
    Fault("decode d256 P proxy fence", DECODE_D256, f"{_DECODE_D256}:767",
          "no proxy fence between P in shared memory and its product", (Removal(_DECODE_D256, "fence_proxy", (767,)),)),
    Fault("d256 e4m3 P over S", E4M3, "#981", "P of a warpgroup is stored over S that the other has not read",
          (Removal(_E4M3, "mb_softmax_hi_loaded", (1980, 2137)),)),
    Fault("d192 return edge of the alias", D192, "#575", "no wait that keeps a warp from two phases ahead",
          (Removal(_D192, "mb_qo_slab_free", (1649,)),)),
    Fault("d192 alias on empty tiles", D192, f"{_D192}:1263", "a tile without keys does not take its phase",
          (Removal(_D192, "_wait_mbarrier", ((1271, 1275),)),)),
    Fault("backward d512 teardown", BACKWARD, f"{_BACKWARD}:1290", "a CTA may end before the last arrival of another",
          (Removal(_BACKWARD, "mb_s_xfer_empty", (1299,)),)),
    Fault("backward d512 drain", BACKWARD, f"{_BACKWARD}:684", "no wait for the last commits of the ring at the end",
          (Removal(_BACKWARD, "_empty", (691, 694)),)),
    Fault("backward d512 operand copy", BACKWARD, f"{_BACKWARD}:620", "an operand is loaded over one being copied",
          (Removal(_BACKWARD, "mb_op_utccp_done", (622,)),)),
    Fault("indexer weights of a warp", INDEXER, "#426", "one lane arrives for the stores of all",
          (Edit(_INDEXER, "MBAR_W_LOADED, self.WARP_SIZE", "MBAR_W_LOADED, 1", 3),
           Edit(_INDEXER, "cute.arch.mbarrier_arrive(mbar + MBAR_W_LOADED)",
                "with cute.arch.elect_one(): cute.arch.mbarrier_arrive(mbar + MBAR_W_LOADED)"))),
    Fault("indexer sm_90a dK staging", INDEXER_90, "#1049", "no barriers around the staging of dK",
          (Removal(_INDEXER_90, "barrier", ((968, 971), (985, 988))),)),
    Fault("dense indexer dK staging", DENSE_INDEXER, "#1135", "no barriers around the staging of dK",
          (Removal(_DENSE, "dk_reduce_sync_barrier", (2146, 2159)),)),
    Fault("sparse dKV columns", SPARSE, "#396", "tensor memory of dKV is written while it is read",
          (Removal(_SPARSE, "t2r_dKV23_done_barrier", (1791, 2021, 2485)),)),
    Fault("sparse tensor memory freed", SPARSE_FREED, "#395", "tensor memory is freed in use",
          (Removal(_SPARSE, "tmem_dealloc_barrier", (1271,)),)),
)  # fmt: skip
