"""The modifiers of instructions, which core/modifiers.hpp names for lowering and engine."""

import numpy as np
import pytest
from warpcheck.machine import load_core
from warpcheck.machine.lowering import Lowering
from warpcheck.machine.ptx import parse
from warpcheck_cases.handwritten import launch

KERNEL = ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry k() { ret; }"


@pytest.fixture
def lowering():
    module = parse(KERNEL)
    return Lowering(load_core(), module, module.kernels["k"], {})


def test_a_record_is_packed_in_its_own_order(lowering):
    given = {"scope": "Gpu", "count": 4, "space": "Shared", "semantics": "Release"}
    assert list(lowering.fields["st"]) == ["space", "count", "offset", "semantics", "scope"]
    assert lowering.packed("st", given) == [2, 4, 0, 4, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offset": 4, "sat": True}, "st has no modifier 'sat'; it has space, count, offset, semantics, scope"),
        ({"space": "Sharde"}, "the modifier space is 'Sharde', expected one of Generic, Global, Shared"),
        ({"space": 2}, "the modifier space is 2, expected one of"),
        ({"count": True}, "the modifier count is True, expected int"),
        ({"count": "4"}, "the modifier count is '4', expected int"),
    ],
)
def test_a_handler_that_says_what_a_record_cannot_hold(lowering, given, message):
    with pytest.raises(RuntimeError) as error:
        lowering.packed("st", given)
    assert message in str(error.value)


def test_the_core_refuses_what_a_field_cannot_hold(lowering):
    """The low 32 bits alone would be another offset."""
    lowering.run()
    row = (lowering.ops["st_bulk"], 0, 0, [], [], [0, 1 << 32], (0, 0, -1, 0, False), False, False)
    with pytest.raises(IndexError, match="4294967296"):
        load_core().Program([row], [], 0, [], 0, 0, 0, 0, 0, {})


@pytest.mark.parametrize(
    ("field", "value", "bit"), [("fill_mode", 1, 15), ("swizzle_atomicity", 1, 19), ("swizzle_mode", 3, 13)]
)
def test_replacing_a_field_of_a_tensor_map(field, value, bit):
    """The fill mode and the atomicity of the swizzle once changed places between lowering and engine."""
    words = np.zeros(32, np.uint32)
    launch(f"tensormap.replace.tile.{field}.global.b1024.b32 [%a0], {value};", [words])
    assert words[2] == value << bit and np.count_nonzero(words) == 1
