"""What tells a call from others, whatever asks: `fa4.torch_ops.signature.LastCallGuard`, by itself."""

import pytest
import torch
from torch.autograd import forward_ad

from fa4.runtime.device import chip_by_number, emulating
from fa4.torch_ops.signature import MAX_OPTIONS, LastCallGuard

OPTIONS = (0.5, True, (3, None), 1, "auto", None)


def tensors(*, grad=False):
    x, y = torch.zeros(2, 3, requires_grad=grad), torch.zeros(4)
    return x, None, y, y, None


@pytest.fixture
def guard():
    """That knows a call."""
    guard = LastCallGuard()
    guard.keep(tensors(), OPTIONS, "kept")
    assert guard.find(tensors(), OPTIONS) is None, "what came once is not looked for"
    guard.keep(tensors(), OPTIONS, "kept")
    assert guard.find(tensors(), (0.25 * 2, True, (3, None), 1, "auto", None)) == "kept"  # of other objects
    return guard


X, _, Y, *_ = tensors()
OTHERS = {
    "shape": (torch.zeros(2, 4), None, Y, Y, None),
    "stride": (torch.zeros(3, 2).t(), None, Y, Y, None),
    "dtype": (X.double(), None, Y, Y, None),
    "device": (X.to("meta"), None, Y, Y, None),
    "subclass": (torch.nn.Parameter(X, requires_grad=False), None, Y, Y, None),
    "asks for a gradient": tensors(grad=True),
    "one more": (X, torch.zeros(1), Y, Y, None),
    "an array of numpy in place of none": (X, torch.zeros(3).numpy(), Y, Y, None),
    "one less": (X, None, None, None, None),
    "two objects for one": (X, None, Y, Y.clone(), None),
    "another place": (X, Y, None, Y, None),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_another_call(guard, other):
    assert guard.find(other, OPTIONS) is None


@pytest.mark.parametrize("place, value", [(0, 0.25), (1, 1), (2, (3.0, None)), (2, [3, None]), (3, True), (4, "torch")])
def test_other_options_are_another_call_though_they_may_be_equal(guard, place, value):
    assert guard.find(tensors(), (*OPTIONS[:place], value, *OPTIONS[place + 1 :])) is None


def _without_gradients():
    return torch.no_grad()


def _with_tangents():
    return forward_ad.dual_level()


def _on_another_chip():
    return emulating(chip_by_number(90))


@pytest.mark.parametrize("state", [_without_gradients, _with_tangents, _on_another_chip], ids=lambda f: f.__name__[1:])
def test_another_state_is_another_call(guard, state):
    with state():
        assert guard.find(tensors(), OPTIONS) is None
    assert guard.find(tensors(), OPTIONS) == "kept"


def test_deterministic_algorithms_are_another_call(guard):
    torch.use_deterministic_algorithms(True)
    try:
        assert guard.find(tensors(), OPTIONS) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_each_kind_of_layer_has_its_own(guard):
    other = (*OPTIONS[:-1], "sliding")
    for _ in range(2):
        guard.keep(tensors(), other, "other")
    assert (guard.find(tensors(), OPTIONS), guard.find(tensors(), other)) == ("kept", "other")


def test_what_is_made_anew_is_told_by_what_it_came_of():
    guard, way = LastCallGuard(), object()
    for value in ("first", "second"):
        guard.keep(tensors(), OPTIONS, value, way)
    assert guard.find(tensors(), OPTIONS) == "second"


def test_it_forgets_rather_than_grow(guard):
    for i in range(3 * MAX_OPTIONS):
        for _ in range(2):
            guard.keep(tensors(), (i,), i)
        assert guard.find(tensors(), (i,)) == i
    assert len(guard._calls) <= MAX_OPTIONS and len(guard._previous) <= MAX_OPTIONS


@pytest.mark.parametrize("given, options", [((3, None), ()), ((X,), ([3],))], ids=["a number", "no hash"])
def test_what_cannot_be_told_is_not_kept(given, options):
    guard = LastCallGuard()
    for _ in range(3):
        guard.keep(given, options, "kept")
    assert guard.find(given, options) is None
