"""Sequence and heads split at once, checkpoints, and a lost rank, on processes of this machine with gloo."""

import signal

import pytest

import fa4.distributed as cp
from tests import ranks

pytestmark = pytest.mark.rotates(3)


@pytest.mark.parametrize("world", [4, 8])
def test_sequence_and_heads_are_split_at_once(world, seed, tmp_path):
    """2 x 2 and 2 x 4 ranks: padded and packed, grouped heads, one key/value head, and what is refused."""
    ranks.run(ranks.split_both_ways, world, tmp_path, "cpu", seed)


def test_training_resumes_from_a_checkpoint_with_the_same_bits(seed, tmp_path):
    """FSDP2, and attention by the ring over the same two ranks."""
    ranks.run(ranks.resumes_bitwise, 2, tmp_path, "cpu", tmp_path / "checkpoint", seed)


@pytest.mark.parametrize("method", cp.METHODS)
def test_a_lost_rank_is_an_error_on_the_others(method, tmp_path):
    """In bounded time, on ranks that are no neighbours of it, too."""
    codes, seconds = ranks.exit_codes_without_a_rank(4, tmp_path, "cpu", method)
    assert codes == [3, 3, 3, -signal.SIGKILL] and seconds < ranks.LOST_LIMIT_S["cpu"] + 20
