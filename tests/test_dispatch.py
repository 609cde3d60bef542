"""The table: order, refusals that list every reason, named backends that obey or raise."""

import pytest
import torch

from fa4 import dispatch
from fa4.cases import Case, make
from fa4.device import Chip, chip_by_number, chip_of, emulating
from fa4.dispatch import Backend, HeadDims, NoBackend
from fa4.spec import Feature

PICKY = Backend(
    name="picky",
    summary="for this test",
    chips="sm_100",
    on=lambda chip: chip.number == 100,
    dtypes=(torch.bfloat16,),
    head_dims=HeadDims(multiple=8, largest=128, pairs=((192, 128),)),
    features=frozenset({Feature.CAUSAL}),
    module="fa4.fallback",
    requires=("no_such_module_anywhere",),
)
CPU = chip_of(torch.device("cpu"))


def spec(**kwargs):
    return make(Case("x", **kwargs), 0).spec


@pytest.fixture
def picky_first(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", (PICKY, *dispatch.BACKENDS))
    dispatch.select.cache_clear()
    yield
    dispatch.select.cache_clear()


def test_a_refusal_lists_every_reason():
    reasons = PICKY.refusals(spec(head_dim=132, dtype=torch.float16, softcap=3.0, sink=True), CPU)
    text = "; ".join(reasons)
    for part in (
        "needs sm_100 (this is cpu)",
        "no_such_module_anywhere",
        "float16",
        "(132, 132)",
        "softcap",
        "learnable_sink",
    ):
        assert part in text


def test_auto_takes_the_first_that_fits(picky_first):
    assert dispatch.select(spec(), CPU).name == "torch"


def test_a_named_backend_obeys_or_raises(picky_first):
    assert dispatch.select(spec(), CPU, "torch").name == "torch"
    with pytest.raises(NoBackend, match="picky needs sm_100"):
        dispatch.select(spec(), CPU, "picky")
    with pytest.raises(ValueError, match="backend is 'nope'"):
        dispatch.select(spec(), CPU, "nope")


def test_explain_tells_why_the_preferred_one_was_not_taken(picky_first):
    explanation = dispatch.explain(spec(), CPU)
    assert explanation.chosen == "torch" and explanation.refused[0][0] == "picky"
    assert "not picky: needs sm_100" in str(explanation)


def test_head_dims_take_multiples_and_named_pairs():
    assert PICKY.head_dims.takes(64, 128) and PICKY.head_dims.takes(192, 128)
    assert not PICKY.head_dims.takes(192, 192) and not PICKY.head_dims.takes(36, 36)


def test_cpu_tensors_live_on_the_emulated_chip_inside_emulating():
    chip = chip_by_number(100, emulated=True)
    with emulating(chip):
        assert chip_of(torch.device("cpu")) is chip
    assert chip_of(torch.device("cpu")) == Chip("cpu")


def test_unknown_chip_number_is_refused():
    with pytest.raises(ValueError, match="chip number 77 is not known"):
        chip_by_number(77)


def test_spec_features_are_those_in_use():
    assert spec(causal=True, heads_q=4, heads_kv=2).features() == {Feature.CAUSAL, Feature.GQA}
    assert spec(window_size=(3, 0)).features() == {Feature.CAUSAL, Feature.WINDOW}
