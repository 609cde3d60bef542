"""Attention to keys in parts, merged by lse: a prefix that all sequences share, and decode context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...api.states import merge_states
from ...kvcache import flash_attn_with_kvcache

if TYPE_CHECKING:
    from .backend import Metadata

SHORTEST_PREFIX = 1024  # tokens; below, the second launch and the merge take longer than reading the prefix again


def cascade(call: dict[str, Any], batch: Metadata, page: int) -> Tensor:
    """Attend to the common prefix with all queries as those of one sequence, and to the rest of each sequence.

    call: arguments of the whole, without a window or ALiBi slopes, whose distances would be those in a part.
    """
    if batch.prefix_len % page:
        raise ValueError(f"common_prefix_len is {batch.prefix_len}, expected a multiple of the page's {page} rows")
    pages, rows = batch.prefix_len // page, call["q"].shape[0]
    as_int = dict(dtype=torch.int32, device=call["q"].device)
    prefix = call | dict(
        page_table=batch.block_table[:1, :pages], cache_seqlens=torch.full((1,), batch.prefix_len, **as_int),
        cu_seqlens_q=batch.query_start_loc[[0, -1]], max_seqlen_q=rows, max_seqlen_k=batch.prefix_len, causal=False,
        learnable_sink=None,
    )  # fmt: skip
    rest = call | dict(
        page_table=batch.block_table[:, pages:],
        cache_seqlens=(batch.seq_lens - batch.prefix_len).clamp(min=0),
        max_seqlen_k=max(batch.max_seq_len - batch.prefix_len, 0),
    )
    states = [flash_attn_with_kvcache(**part, return_lse=True) for part in (prefix, rest)]
    outs, lses = zip(*states)
    return merge_states(outs, lses)[0]


class DcpContext:
    """Lengths of a rank's part of the context, in a buffer with a fixed address.

    Each rank has every `world_size`-th group of `interleave` keys of a sequence.
    """

    def __init__(self, world_size: int, rank: int, interleave: int, sequences: int, device: torch.device) -> None:
        self.world_size, self.rank, self.interleave = world_size, rank, interleave
        self.buffer = torch.zeros(sequences, dtype=torch.int32, device=device)

    @staticmethod
    def of(config: Any, kv_cache_spec: Any, device: torch.device) -> DcpContext | None:
        """Return the context of vLLM's configuration; None without decode context parallelism."""
        parallel: Any = getattr(config, "parallel_config", None)
        if getattr(parallel, "decode_context_parallel_size", 1) == 1:
            return None
        from vllm.distributed.parallel_state import get_dcp_world_size_and_rank

        world_size, rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        if world_size == 1:  # a draft model's cache that each rank has whole
            return None
        interleave, sequences = parallel.cp_kv_cache_interleave_size, config.scheduler_config.max_num_seqs
        return DcpContext(world_size, rank, interleave, sequences, device)

    def lengths(self, common: Any) -> Tensor | None:
        """Return the keys before the new ones that this rank has, of each sequence. None if the host knows that no rank
        has any, which is the same on all ranks."""
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        bound, starts = common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu
        if bound is not None and not bool((bound - (starts[1:] - starts[:-1]) > 0).any()):
            return None
        context = common.seq_lens - (common.query_start_loc[1:] - common.query_start_loc[:-1])
        own = get_dcp_local_seq_lens(context, self.world_size, self.rank, self.interleave)
        self.buffer[: len(own)].copy_(own)
        return self.buffer[: len(own)]


def combine() -> Callable[..., Any]:
    """Return vLLM's function that adds up the ranks' results by lse, as its configuration asks for it."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

    config = get_current_vllm_config_or_none()
    is_all_to_all = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    return dcp_a2a_lse_reduce if is_all_to_all else cp_lse_ag_out_rs


def with_context(
    call: dict[str, Any], own: tuple[Tensor, Tensor], lengths: Tensor, combine: Callable[..., Any] | None
) -> Tensor:
    """Merge attention to the new keys with that to all ranks' keys before them.

    Args:
        call: arguments for this rank's cache and this rank's query heads.
        own: out and lse of the new keys, sink included.
        lengths: the keys before the new ones that this rank has.
        combine: what `combine` returned.
    """
    from vllm.distributed.parallel_state import get_dcp_group

    assert combine is not None
    group = get_dcp_group()
    queries = group.all_gather(
        call["q"].contiguous(), dim=1
    )  # the query heads of all ranks, which see this rank's keys
    context, lse = flash_attn_with_kvcache(
        **call | dict(q=queries, cache_seqlens=lengths, causal=False, window_size=(None, None), learnable_sink=None),
        return_lse=True,
    )
    context, lse = combine(context, lse.transpose(0, 1).contiguous(), group, return_lse=True)
    return merge_states([context, own[0]], [lse.transpose(0, 1).contiguous(), own[1]])[0]
