"""Context parallelism: attention over sequences that are split over the ranks of a process group.

Each sequence is cut into 2 W chunks for W ranks. Rank r holds chunks r and 2 W - 1 - r, concatenated, so that all ranks
have the same number of unmasked pairs under a causal mask (`shard`, `unshard`). There are two methods:

* "ring": keys and values travel from rank to rank while each rank computes with the part it has. Log-sum-exps merge
  the partial results. Gradients of keys and values travel too. Needs memory for one more part.
* "all-gather": every rank gathers all keys and values, a few heads at a time, while it computes the previous heads.

Both add in an order that depends on the ranks only: results are bitwise reproducible if the kernels are.
"""

from .attention import METHODS, context_parallel_attention
from .group_rank import shard, unshard

__all__ = ["METHODS", "context_parallel_attention", "shard", "unshard"]
