"""The suite's own rules: fresh memory is poison in every test."""

import torch


def test_fresh_memory_is_poison():
    like = torch.zeros(3)
    for fresh in (torch.empty(3), torch.empty_like(like), torch.empty_strided((3,), (1,)), like.new_empty(3)):
        assert fresh.isnan().all()
    assert torch.empty(3, dtype=torch.float16, requires_grad=True).isnan().all()
    assert (torch.empty(2, dtype=torch.int32) == 0x5A5A5A5A).all()
    assert (torch.empty(2, dtype=torch.uint8) == 0x5A).all() and torch.empty(2, dtype=torch.bool).all()
