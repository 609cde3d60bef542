"""The emulator's commands answer options that they cannot use with a sentence, not with a traceback."""

import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from warpcheck.tools import compare, mutate

from fa4.cli.main import main
from fa4.emulator import answers, record
from tests.emulator import foreign

QUACK = "quack-kernels gemm 200 x 264 x 192 sm_100a"

REFUSALS = {
    "unknown_chip": ("'sm_42' is not one of 'sm_80'", main, ["emulate", "fwd", "--chip", "sm_42"]),
    "no_multiprocessor": ("0 is not in the range x>=1", main, ["emulate", "fwd", "--sms", "0"]),
    "no_seed": ("0 is not in the range x>=1", main, ["emulate", "bwd", "--seeds", "0"]),
    "negative_length": ("-5 is not in the range x>=0", main, ["emulate", "fwd", "--seqlen", "-5"]),
    "no_head_dim": ("0 is not in the range x>=1", main, ["emulate", "fwd", "--head-dim", "0"]),
    "heads": ("2 does not divide 3 query heads", main, ["emulate", "fwd", "--heads", "3", "--heads-kv", "2"]),
    "window": ("-7 is not in the range x>=-1", main, ["emulate", "fwd", "--window-size", "-7", "3"]),
    "softcap": ("-1.0 is not in the range x>=0", main, ["emulate", "fwd", "--softcap", "-1"]),
    "backend": ("backend is 'nope', expected one of 'auto'", main, ["emulate", "fwd", "--backend", "nope"]),
    "no_gpu": ("no GPU to compare with", compare.main, []),
    "no_gpu_answers": ("no GPU here", answers.main, ["keep", "here.npz"]),
    "pattern": ("'(' is no regular expression", compare.main, ["--only", "("]),
    "record_for": ("'sm_42' is not one of", record.main, ["here", "--cutlass", ".", "--chip", "sm_42"]),
    "mutate_what": ("xyz is a foreign example: --cutlass says where it is", mutate.main, ["xyz"]),
    "mutate_nothing": ("xyz is neither a script, a file nor one of", mutate.main, ["xyz", "--cutlass", "."]),
    "mutate_calls": ("xyz is no call of `warpcheck catalogue --packages`", mutate.main, [QUACK, "xyz"]),
    "foreign_pattern": ("'[' is no regular expression", foreign.main, ["--cutlass", ".", "--only", "["]),
}


@pytest.mark.parametrize("message, command, arguments", REFUSALS.values(), ids=REFUSALS)
def test_bad_options_are_usage_errors(message, command, arguments, monkeypatch):
    def no_device():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(compare, "Device", no_device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", "").split())
