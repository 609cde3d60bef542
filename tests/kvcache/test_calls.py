"""A call on a cache like an earlier one is known by one look, and told from all others."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4.kvcache import calls
from fa4.torch_ops.signature import routes


def arguments(seed, **changes):
    """A few sequences in pages, by turns with new rows; `changes` replace or add arguments."""
    generator = torch.Generator().manual_seed(seed)
    q, pages, more = (torch.randn(shape, generator=generator) for shape in ((2, 1, 4, 8), (9, 4, 2, 8), (9, 4, 2, 8)))
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    given = dict(q=q, k_cache=pages, v_cache=more, cache_seqlens=torch.tensor([7, 12], dtype=torch.int32))
    return given | dict(page_table=table, causal=True) | changes


def look(given) -> calls.CachedKvCall | None:
    """What one look knows of a call."""
    names = calls_of_tensors()
    options = (
        given.get("softmax_scale"), given["causal"], given.get("window_size", (None, None)), given.get("softcap", 0.0),
        given.get("backend", "auto"), given.get("num_splits", 0), False, True, False,
    )  # fmt: skip
    return calls.plain_calls.last.find(tuple(given.get(name) for name in names), options)


def calls_of_tensors() -> tuple[str, ...]:
    from fa4.kvcache.checks import Tensors

    return (*Tensors._fields, "learnable_sink")


@pytest.fixture
def known(seed):
    """A call that has come so often that one look knows it."""
    calls.plain_calls.clear()
    given = arguments(seed)
    for _ in range(3):
        fa4.flash_attn_with_kvcache(**given)
    assert look(given) is not None
    return given


NEW = torch.ones(2, 1, 2, 8)
CHANGES = {
    "values": lambda g: dict(q=g["q"] + 1),
    "lengths": lambda g: dict(cache_seqlens=torch.tensor([16, 1], dtype=torch.int32)),
    "dtype": lambda g: {name: g[name].half() for name in ("q", "k_cache", "v_cache")},
    "queries": lambda g: dict(q=g["q"].expand(2, 3, 4, 8).contiguous()),
    "one tensor twice": lambda g: dict(v_cache=g["k_cache"]),
    "no pages": lambda g: dict(page_table=None, k_cache=g["k_cache"][:2], v_cache=g["v_cache"][:2], cache_seqlens=3),
    "new rows": lambda g: dict(k=NEW, v=NEW + 1, k_cache=g["k_cache"].clone(), v_cache=g["v_cache"].clone()),
    "scale": lambda g: dict(softmax_scale=0.5),
    "window": lambda g: dict(window_size=(2, 0)),
    "softcap": lambda g: dict(softcap=2.0),
    "sink": lambda g: dict(learnable_sink=torch.ones(4)),
    "leftpad": lambda g: dict(cache_leftpad=torch.tensor([1, 2], dtype=torch.int32)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_that_differs_gets_its_own_result(known, change):
    given = known | change(known)
    got = fa4.flash_attn_with_kvcache(**given)
    calls.plain_calls.clear()
    assert torch.equal(got, fa4.flash_attn_with_kvcache(**known | change(known)))


@pytest.mark.parametrize("wrong", [dict(causal=1), dict(softcap=False), dict(num_splits=False)], ids=str)
def test_a_wrong_type_is_refused_also_where_it_equals_a_right_value(known, wrong):
    with pytest.raises((TypeError, ValueError)):
        fa4.flash_attn_with_kvcache(**known | wrong)


@pytest.mark.parametrize("wrong", [-1, 17])
def test_a_number_for_all_sequences_is_checked_at_each_call(seed, wrong):
    """Calls with other numbers are alike."""
    calls.plain_calls.clear()
    given = arguments(seed)
    for n in (3, 4, 16):
        fa4.flash_attn_with_kvcache(**given | dict(cache_seqlens=n))
    with pytest.raises(ValueError, match=f"cache_seqlens is {wrong}"):
        fa4.flash_attn_with_kvcache(**given | dict(cache_seqlens=wrong))
    assert len([x for x in routes._values if x.kind == "cache"]) == 1


def test_a_tensor_that_comes_twice_is_known_as_such(known):
    """Two of one shape in its places are another call, but one that is as good."""
    twice = known | dict(v_cache=known["k_cache"])
    for _ in range(3):
        fa4.flash_attn_with_kvcache(**twice)
    assert look(twice) is not None and look(known) is None
    out = fa4.flash_attn_with_kvcache(**known)
    calls.plain_calls.clear()
    assert torch.equal(out, fa4.flash_attn_with_kvcache(**known))


def test_layers_that_alternate_are_both_known(known):
    """As in models whose layers have a window by turns."""
    other = known | dict(window_size=(4, 0))
    for given in (known, other, known, other):
        fa4.flash_attn_with_kvcache(**given)
    assert look(known) is not None and look(other) is not None
    assert look(known) is not look(other)


def test_whoever_watches_sees_operators(known):
    with FlopCounterMode(display=False):
        assert look(known) is None
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="no gradients"):
        fa4.flash_attn_with_kvcache(**known | dict(q=known["q"].clone().requires_grad_()))


def test_another_stage_of_devices_is_not_this_one(known):
    """What was found out on this machine's chip says nothing of an emulated one."""
    from fa4.runtime.device import chip_by_number, emulating

    with emulating(chip_by_number(90)):
        assert look(known) is None
    assert look(known) is not None
