"""Attention over sequences that are cut among processes: context parallelism on a process group.

Of each sequence, cut into 2 W chunks, rank r of W holds chunks r and 2 W - 1 - r, one behind the other, so that all
ranks have as many visible pairs under a causal mask (`shard`, `unshard`). Two ways lead to the keys of others:

* "ring": keys and values travel from rank to rank while the part that is here is computed; the parts are joined by
  their log-sum-exps. Gradients of keys and values travel on with them. Memory for one more part.
* "all-gather": every rank gets all keys and values, a few heads at a time, while it computes with the heads before.

Both add in an order that ranks alone decide: results repeat bit for bit where the kernels' do.
"""

from .attention import METHODS, context_parallel_attention
from .group_rank import shard, unshard

__all__ = ["METHODS", "context_parallel_attention", "shard", "unshard"]
