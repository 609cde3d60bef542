"""The suite's own rules: fresh memory is poison in every test."""

from pathlib import Path

import torch

from tests import conftest

pytest_plugins = ["pytester"]


def test_fresh_memory_is_poison():
    like = torch.zeros(3)
    for fresh in (torch.empty(3), torch.empty_like(like), torch.empty_strided((3,), (1,)), like.new_empty(3)):
        assert fresh.isnan().all()
    assert torch.empty(3, dtype=torch.float16, requires_grad=True).isnan().all()
    assert (torch.empty(2, dtype=torch.int32) == 0x5A5A5A5A).all()
    assert (torch.empty(2, dtype=torch.uint8) == 0x5A).all() and torch.empty(2, dtype=torch.bool).all()


def test_each_part_of_rotating_tests_is_another_and_all_together_are_whole(pytester):
    pytester.makeconftest(Path(conftest.__file__).read_text())
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.rotates(3)
        @pytest.mark.parametrize("case", range(7))
        def test_rotates(case): ...

        def test_stays(): ...
        """
    )
    runs = []
    for part in range(3, 6):
        result = pytester.runpytest("-q", "--collect-only", f"--part={part}", "-W", "ignore")
        runs.append([line for line in result.outlines if "::" in line])
    assert all("test_stays" in run[-1] and len(run) in (3, 4) for run in runs)
    assert sorted(case for run in runs for case in run[:-1]) == [
        f"{runs[0][-1].split('::')[0]}::test_rotates[{case}]" for case in range(7)
    ]
