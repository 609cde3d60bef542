"""Would a missing synchronisation of fa4's own kernels be noticed? The commands of docs/results/mutants.md, run."""

import re

import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.emulator.mutate import main

BLACKWELL = "--letter --leftovers "
LARGE_LOGITS = "--seqlen 384 --seqlen 300x120 --logits 30 --heads 3 "
HOPPER = "--chip sm_90a --letter --leftovers"
CONSUMER = "--chip sm_120a --letter --leftovers"
SHAPES = "--seqlen 320 --seqlen 150x300 --seqlen 520x400 --seqlen 100x700 "
AMPERE = "--chip sm_80 --causal --heads 2 --head-dim 64 --seqlen 256 --seqlen 100x300 --sms 2"
COMMANDS = {
    "forward": "fwd --causal --head-dim 64 --seqlen 200x1300 --sms 2 " + LARGE_LOGITS + BLACKWELL,
    "forward_pair": "fwd --head-dim 128 --seqlen 300x1300 --sms 4 " + LARGE_LOGITS + BLACKWELL,
    "backward": "bwd --causal --heads 2 --head-dim 64 --seqlen 256 --seqlen 640 --seqlen 100x300 --sms 2 " + BLACKWELL,
    "backward_pair": "bwd --head-dim 128 --seqlen 500x250 --seqlen 300x520 --window 200 150 --sms 4 " + BLACKWELL,
    "sm90_forward": "fwd --causal --heads 6 --head-dim 64 --seqlen 200x500 --seqlen 70x40 --sms 2 " + HOPPER,
    "sm90_backward": "bwd --causal " + SHAPES + "--sms 6 --seeds 2 " + HOPPER,
    "sm90_latent": "fwd --latent --causal --heads 16 --seqlen 4x300 --seqlen 1x97 --seqlen 1x20 --seqlen 8x128 "
    "--logits 10 --sms 4 --seeds 2 " + HOPPER,
    "widest_forward": "fwd --causal --head-dim 512 --heads 3 --seqlen 200x900 --seqlen 130x120 --seqlen 300x600 "
    "--logits 30 --sms 4 --seeds 2 " + BLACKWELL,
    "sm90_widest": "fwd --causal --head-dim 512 --heads 3 --seqlen 200x900 --seqlen 130x120 --seqlen 300x600 "
    "--logits 30 --sms 4 --seeds 2 " + HOPPER,
    "widest_backward": "bwd --causal --head-dim 512 --seqlen 300x520 --seqlen 130x120 --sms 4 --seeds 1 " + BLACKWELL,
    "sm120_e4m3": "fwd --e4m3 --causal --head-dim 128 --heads 3 --seqlen 300x900 --seqlen 384 --seqlen 200x60 "
    "--logits 30 --sms 2 --seeds 2 " + CONSUMER,
    "sm120_mxfp8": "fwd --mxfp8 --causal --head-dim 128 --heads 3 --seqlen 300x900 --seqlen 384 --seqlen 200x60 "
    "--logits 30 --sms 2 --seeds 2 " + CONSUMER,
    "sm120_nvfp4": "fwd --nvfp4 --causal --head-dim 128 --heads 3 --seqlen 300x900 --seqlen 384 --seqlen 200x60 "
    "--logits 30 --sms 2 --seeds 2 " + CONSUMER,
    "sm80_forward": "fwd " + AMPERE,
    "sm80_backward": "bwd " + AMPERE,
}

# What is redundant; docs/results/mutants.md tells why. `warpcheck.tools.explained` explains more, in EXPLAINED.
SURVIVORS = {
    "forward": {"mbarrier wait": 6, "tcgen05 fence": 2, "warp barrier": 4, "proxy fence": 6},
    "forward_pair": {"mbarrier wait": 4, "tcgen05 fence": 2, "warp barrier": 4},
    "backward": {"mbarrier wait": 1},
    "sm90_forward": {"mbarrier wait": 10, "wgmma fence": 4, "warp barrier": 4},
    "sm90_backward": {"mbarrier wait": 3, "commit": 1, "warp barrier": 1, "proxy fence": 2},
    "widest_forward": {"tcgen05 fence": 4},
    "sm90_widest": {"cluster barrier": 1, "mbarrier wait": 12, "mbarrier arrive": 4},
    "widest_backward": {"mbarrier wait": 1, "tcgen05 wait": 6},
    # Waits for K and V of blocks that a consumer passes over, and of the load role for V's stage; fences after reads.
    "sm120_e4m3": {"mbarrier wait": 3, "proxy fence": 7},
    "sm120_mxfp8": {"mbarrier wait": 3, "proxy fence": 7},
    "sm120_nvfp4": {"mbarrier wait": 1, "proxy fence": 5},
    "sm80_forward": {"CTA barrier": 1},
}
EXPLAINED = {
    *("sm90_backward", "sm90_latent", "sm90_widest", "sm120_e4m3", "sm120_mxfp8", "sm120_nvfp4"),
    *("widest_forward", "widest_backward"),
}


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", COMMANDS)
def test_mutants_are_killed(name):
    done = CliRunner().invoke(main, COMMANDS[name].split(), catch_exceptions=False)
    print(done.output)
    rows = re.findall(r"^\| ([^|*]+) \| (\d+) \| (\d+) \| [^|]*\|([^|]*)\|$", done.output, re.M)
    assert rows, done.output
    lived = {
        kind: int(mutants) - int(killed) - sum(map(int, re.findall(r": (\d+)", why))) * (name in EXPLAINED)
        for kind, mutants, killed, why in rows
    }
    assert {kind: number for kind, number in lived.items() if number} == SURVIVORS.get(name, {}), done.output
