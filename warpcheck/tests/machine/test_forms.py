"""Rows that are repeated by the form of an instruction are the handler's."""

import pytest
from warpcheck.errors import UnknownInstruction
from warpcheck.machine import load_core
from warpcheck.machine.lowering import Lowering, lower
from warpcheck.machine.ptx import parse
from warpcheck_cases.opcodes import CASES
from warpcheck_cases.opcodes.run import for_chip

HEAD = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry k() {{ .reg .b32 %r<9>; .reg .b64 %d<9>; {} ret; }}"""


def lowered(module) -> list:
    made = []
    for kernel in module.kernels.values():
        lowering = Lowering(load_core(), module, kernel, dict.fromkeys(module.variables, 4096))
        lowering.run()
        made.append((lowering.rows, lowering.sources, lowering.constants, lowering.preset_rows, lowering.register_bits))
    return made


@pytest.fixture
def handlers_alone(monkeypatch):
    """From its call on, no form is known or found."""

    def call():
        monkeypatch.setattr(lower, "_FORMS", {})
        monkeypatch.setattr(lower, "form_of", lambda *args: None)

    monkeypatch.setattr(lower, "_FORMS", {})
    return call


def test_every_opcode_case_is_lowered_alike(handlers_alone):
    modules = [parse(for_chip(case, case.chips[-1])) for case in CASES]
    for module in modules:
        lowered(module)  # which finds the forms
    by_form = [lowered(module) for module in modules]
    forms = [form for form in lower._FORMS.values() if form is not None]
    assert len(forms) > 0.7 * len(lower._FORMS), "most opcodes do not look into their operands"
    handlers_alone()
    for case, module, made in zip(CASES, modules, by_form):
        assert made == lowered(module), case.name


@pytest.mark.parametrize(
    "good, bad, message",
    [
        ("ld.global.b32 %r1, [%d1+4];", "ld.global.b32 %r1, %d1;", "is not an address"),
        ("add.s32 %r1, %r2, 3;", "add.s32 3, %r2, 3;", "cannot be a destination"),
        ("add.f32 %r1, %r2, 3;", f"add.f32 %r1, %r2, {1 << 70};", "does not fit .f32"),
        ("mov.b32 %r1, %laneid;", "mov.b32 %r1, %lane;", "unknown special register %lane"),
        ("setmaxnreg.inc.sync.aligned.u32 40;", "setmaxnreg.inc.sync.aligned.u32 %r1;", "unknown operand form"),
    ],
)
def test_a_mistake_is_told_alike(good, bad, message, handlers_alone):
    told = []
    for before in (lambda: None, lambda: None, handlers_alone):  # the second time its form is known, if it has one
        before()
        with pytest.raises(UnknownInstruction, match=message) as error:
            lowered(parse(HEAD.format(f"{good} {good} {bad}")))
        told.append(str(error.value))
    assert told[0] == told[1] == told[2]


def test_literals_and_offsets_are_the_instructions_own(handlers_alone):
    text = HEAD.format(
        "".join(
            f"ld.global.b32 %r1, [%d1+{4 * i}]; add.s32 %r2, %r1, {i}; prmt.b32 %r3, %r1, %r2, {i};" for i in range(3)
        )
    )
    (by_form,) = lowered(parse(text))
    offsets = [row.modifiers[2] for row in by_form[0] if row.op == load_core().OPS["ld"]]
    assert offsets == [0, 4, 8] and {0, 1, 2} <= {value for value, _, _ in by_form[2]}
    handlers_alone()
    assert [by_form] == lowered(parse(text))
