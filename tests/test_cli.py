"""The command line: env, explain, demo."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fa4.cli import demo
from fa4.cli.main import main, support_table
from fa4.runtime import dispatch


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_env_prints_the_same_facts_as_text_and_json():
    facts = json.loads(run("env", "--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert set(facts["backends"]) == set(dispatch.backend_names())
    assert facts["versions"]["torch"] in run("env")


def test_explain_answers_for_chips_that_are_not_here():
    assert "backend  torch" in run("explain", "--causal", "--backward", "--dtype", "fp64", "--chip", "100")
    assert "backend  torch" in run("explain", "--chip", "0", "--varlen", "--sink", "--softcap", "20")


@pytest.mark.parametrize("name", ["sm_90a", "sm_90", "90"])
def test_a_chip_is_known_by_its_target_or_its_number(name):
    lines = run("explain", "--chip", name, "--seqlen", "512", "--causal").splitlines()
    assert lines[0].startswith("chip     sm_90") and lines[1] == "backend  sm90"


def test_explain_refuses_a_backend_that_does_not_exist():
    assert "backend is 'nope', expected one of 'auto'" in " ".join(run("explain", "--backend", "nope", code=2).split())


def test_explain_knows_functions_blocks_and_dropout():
    asked = ["explain", "--chip", "90", "--backward"]
    assert "backend  sm90" in run(*asked, "--dropout", "0.1", "--score-mod", "fa4.scores:softcap(20.0)")
    assert "backend  sm90" in run(*asked, "--mask-mod", "fa4.masks:causal", "--block-size", "128")
    other_blocks = run(*asked, "--mask-mod", "fa4.masks:sliding_window(100)", "--block-size", "100")
    assert "not sm90: " in other_blocks and "lacks block_mask with blocks of (100, 100)" in other_blocks
    many = run(*asked, "--mask-mod", "tests.test_cli:in_a_long_row")
    assert "backend  torch" in many and "lacks a mask_mod that reads 65 captured numbers for each pair" in many


def in_a_long_row(b, h, q_idx, kv_idx):
    return (kv_idx == ROW).any()


ROW = torch.arange(65)


REFUSALS = {
    "no_such_function": ("has no attribute 'nope'", ["explain", "--mask-mod", "fa4.masks:nope"]),
    "no_function": ("expected a function of (b, h, q_idx, kv_idx)", ["explain", "--mask-mod", "math:pi"]),
    "blocks_of_nothing": ("is given without --mask-mod", ["explain", "--block-size", "128"]),
    "more_than_all_dropped": ("--dropout", ["explain", "--dropout", "1.5"]),
    "no_chip": ("'hopper' is not a chip, expected a target such as sm_90a", ["explain", "--chip", "hopper"]),
    "unknown_target": ("chip number 77 is not known", ["explain", "--chip", "sm_77a"]),
    "unknown_chip": ("chip number 77 is not known", ["explain", "--chip", "77"]),
    "no_head_dim": ("--head-dim", ["explain", "--head-dim", "0"]),
    "heads_do_not_divide": ("2 does not divide 3 query heads", ["explain", "--heads-q", "3", "--heads-kv", "2"]),
    "negative_window": ("--window-size", ["explain", "--window-size", "-5", "0"]),
    "negative_softcap": ("--softcap", ["explain", "--softcap", "-1"]),
    "softcap_is_no_number": ("expected a finite number", ["explain", "--softcap", "nan"]),
    "a_chip_of_no_known_kind": ("chip number 130 is not known", ["explain", "--chip", "130"]),
    "demo_with_a_seed_too_large": ("--seed", ["demo", "--seed", str(2**70)]),
    "demo_where_there_are_no_values": ("'meta' is not a device of this machine", ["demo", "--device", "meta"]),
    "emulate_with_a_trace_nowhere": ("is in no directory", ["emulate", "fwd", "--trace", "/no/such/place/x.json"]),
    "demo_without_steps": ("--steps", ["demo", "--steps", "0"]),
    "demo_on_an_unknown_device": ("'nope' is not a device of this machine", ["demo", "--device", "nope"]),
    "demo_with_an_unknown_backend": ("backend is 'nope', expected one of", ["demo", "--backend", "nope"]),
}


@pytest.mark.parametrize("message, arguments", REFUSALS.values(), ids=REFUSALS)
def test_bad_options_are_usage_errors(message, arguments):
    try:
        assert message in " ".join(run(*arguments, code=2).replace("│", "").split())
    finally:
        torch.use_deterministic_algorithms(False)


def test_demo_stops_where_the_named_backend_cannot_run():
    try:
        text = run("demo", "--backend", "sm100", "--device", "cpu", code=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "not sm100: needs sm_100 or sm_103 (this is cpu)" in text


def test_support_table_of_the_page_is_the_dispatchers():
    text = (Path(__file__).parents[1] / "docs" / "support.md").read_text()
    assert support_table() in text, "run `python -m fa4 explain --table` and paste it into docs/support.md"
    assert run("explain", "--table").strip() == support_table()


def test_the_support_table_tells_what_rows_lack_of_features_that_they_have():
    """A row without a lack serves all; what a limit's words say, `refusals` says of a problem."""
    table = support_table()
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    letters = {text: letter for letter, text in re.findall(r"^\* \((\w)\) (.*)$", table, flags=re.MULTILINE)}
    assert len(lines) == len(dispatch.BACKENDS) and len(letters) > 4
    for line, row in zip(lines, dispatch.BACKENDS):
        cell = line.split(" | ")[4]
        told = {text for text, letter in letters.items() if f"({letter})" in cell}
        assert told == {limit.text for limit in row.limits if limit.of & row.features}
        assert (cell == "nothing") == (not told and row.features == dispatch.ALL_FEATURES)


def test_demo_trains_and_is_deterministic():
    try:
        text = run("demo", "--steps", "3", "--device", "cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert "bitwise equal" in text and "backend         torch" in text
    before, after = map(float, re.search(r"held-out loss\s+([\d.]+) before, ([\d.]+) after", text).groups())
    assert after < before
    assert "by the Blackwell kernel" in text and "no finding" in text and "softmax, correction, mma" in text


def test_demo_weights_depend_on_the_seed():
    """The digest can tell runs apart, so equal digests mean something."""
    model, device = demo.ModelConfig(layers=1), torch.device("cpu")
    digests = [
        demo.train(model, demo.TrainConfig(steps=1, batch=1, seqlen=32, seed=seed), device).weights_digest
        for seed in (0, 0, 1)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_demo_reads_real_text():
    text = bytes(demo.corpus().tolist()).decode()
    assert len(text) > 100_000 and " the " in text


@pytest.mark.parametrize("command", ["env", "explain", "demo"])
def test_help_speaks(command):
    assert "Usage" in run(command, "--help")


def test_emulate_judges_our_kernel_and_writes_a_trace(tmp_path):
    trace = tmp_path / "trace.json"
    text = run(
        *("emulate", "fwd", "--seqlen", "70", "--head-dim", "64", "--causal", "--trace", str(trace), "--seeds", "2")
    )
    assert "sm100 on sm_100a, seed 0, round_robin" in text and "sm100 on sm_100a, seed 1, random" in text
    assert "out: error" in text and "WRONG" not in text and "softmax:" in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_emulate_refuses_what_no_backend_can_do():
    assert "lacks head_dim (20, 20)" in run("emulate", "fwd", "--head-dim", "20", "--backend", "sm100", code=1)
