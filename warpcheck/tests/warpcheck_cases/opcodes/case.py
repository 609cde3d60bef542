"""One opcode case: a PTX entry `test`, its inputs, and what the ISA says it leaves in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Inputs = tuple[np.ndarray, ...]
_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


@dataclass(frozen=True)
class Case:
    """A kernel `test(out, in0, in1, ...)` and its oracle.

    name: opcode with its modifiers, and what else sets the case apart.
    ptx: a whole module with the entry `test`, for `target` and newer chips.
    inputs: arrays from a random generator, passed by pointer after the output.
    expected: what the entry writes to `out`, from the inputs.
    compare: "bits" (NaNs of any payload are equal), or the largest error allowed:
        "ulp N" against a float64 oracle, "abs X" and "rel X" as the ISA documents approximate functions.
    element: the type of the output, for `compare`: "b32", "f32", "f16", "bf16", ...
    """

    name: str
    ptx: str
    inputs: Callable[[np.random.Generator], Inputs]
    expected: Callable[..., np.ndarray]
    target: str = "sm_80"
    element: str = "b32"
    compare: str = "bits"
    grid: int = 1
    block: int = 32
    cluster: int = 1
    smem_bytes: int = 0
    chips: tuple[str, ...] = field(default=("sm_80", "sm_90a", "sm_100a"))


def header(target: str) -> str:
    """The first lines of a PTX module."""
    return f".version 8.8\n.target {target}\n.address_size 64\n"


def entry(target: str, body: str, *, pointers: int, shared: str = "") -> str:
    """A module whose entry `test` has the pointer %out and %in0.. in registers, %i in a 32-bit one.

    Registers: %r 32 bits, %d 64, %h 16, %f f32, %p predicates, 64 of each.
    """
    names = ["out", *(f"in{i}" for i in range(pointers))]
    parameters = ",\n".join(f"  .param .u64 param_{name}" for name in names)
    loads = "\n".join(f"  ld.param.u64 %{name}, [param_{name}];" for name in names)
    registers = " ".join(f"%{name}," for name in names).rstrip(",")
    return f"""{header(target)}
{shared}
.visible .entry test(
{parameters}
) {{
  .reg .b64 {registers};
  .reg .b32 %i;
  .reg .b32 %r<64>;
  .reg .b64 %d<64>;
  .reg .b16 %h<64>;
  .reg .f32 %f<64>;
  .reg .pred %p<64>;
{loads}
  mov.u32 %i, %tid.x;
{body}
  ret;
}}
"""


def element_address(pointer: str, register: str, nbytes: int, index: str = "%i") -> str:
    """Code that leaves the address of element `index` of an array in a 64-bit register."""
    return f"  mul.wide.u32 {register}, {index}, {nbytes};\n  add.s64 {register}, {register}, {pointer};"


def load_element(register: str, nbytes: int = 4, kind: str = "") -> str:
    """Code that loads element %i of in0; it leaves the address in %d0. kind: type of the load, default untyped."""
    return f"{element_address('%in0', '%d0', nbytes)}\n  ld.global.{kind or f'b{8 * nbytes}'} {register}, [%d0];"


def store_element(register: str, nbytes: int = 4, index: str = "%i") -> str:
    """Code that stores a register to an element of out; it leaves the address in %d1."""
    return f"{element_address('%out', '%d1', nbytes, index)}\n  st.global.b{8 * nbytes} [%d1], {register};"


def elementwise(
    name: str,
    code: str,
    *,
    result: str,
    operands: Sequence[str],
    inputs: Callable[[np.random.Generator], Inputs],
    expected: Callable[..., np.ndarray],
    element: str | None = None,
    target: str = "sm_80",
    compare: str = "bits",
    chips: tuple[str, ...] | None = None,
) -> Case:
    """One thread per element: %x0, %x1, ... hold the operands (untyped bits), the code leaves the result in %y."""
    block = 256
    body = [f"  .reg .{result} %y;"]
    body += [f"  .reg .{kind} %x{i};" for i, kind in enumerate(operands)]
    for i, kind in enumerate(operands):
        body += [element_address(f"%in{i}", "%d0", _BYTES[kind]), f"  ld.global.{kind} %x{i}, [%d0];"]
    body += [f"  {code}", element_address("%out", "%d0", _BYTES[result]), f"  st.global.{result} [%d0], %y;"]

    def padded(rng: np.random.Generator) -> Inputs:
        return tuple(np.resize(array, block) for array in inputs(rng))

    return Case(
        name,
        entry(target, "\n".join(body), pointers=len(operands)),
        padded,
        expected,
        target=target,
        element=element or result,
        compare=compare,
        block=block,
        chips=chips or _chips_from(target),
    )


def _chips_from(target: str) -> tuple[str, ...]:
    everything = ("sm_80", "sm_90a", "sm_100a")
    return everything[everything.index(target) :]


def for_chip(case: Case, chip: str) -> str:
    """The case's PTX retargeted to a newer chip."""
    return re.sub(r"\.target \w+", f".target {chip}", case.ptx, count=1)


_BIT_TYPES = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def _as_float(bits: np.ndarray, element: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if element == "bf16":
            return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return bits.view(_FLOATS[element]).astype(np.float64)


def is_nan(bits: np.ndarray, element: str) -> np.ndarray:
    """Which bit patterns are NaN; none are for elements that are no floats."""
    if element not in _BIT_TYPES or bits.itemsize != np.dtype(_BIT_TYPES[element]).itemsize:
        return np.zeros(bits.shape, bool)
    return np.isnan(_as_float(bits.view(_BIT_TYPES[element]), element))


def mismatch(case: Case, got: np.ndarray, expected: np.ndarray) -> str | None:
    """None when `got` is right, otherwise the first wrong elements in words.

    got: what the entry wrote. expected: the oracle's bits, or float64 values for approximate results.
    """
    if case.compare == "bits":
        dtype = _BIT_TYPES.get(case.element, got.dtype)
        got, want = got.view(dtype), np.ascontiguousarray(expected).reshape(-1).view(dtype)
        wrong = got != want
        if case.element in _BIT_TYPES:
            wrong &= ~(np.isnan(_as_float(got, case.element)) & np.isnan(_as_float(want, case.element)))
        shown = [f"[{i}] got {got.flat[i]:#x}, expected {want.flat[i]:#x}" for i in np.flatnonzero(wrong)[:4]]
    else:
        values, want = _as_float(got, case.element), np.asarray(expected, np.float64).reshape(got.shape)
        wrong = ~_within(values, want, case)
        shown = [f"[{i}] got {values.flat[i]!r}, expected {want.flat[i]!r}" for i in np.flatnonzero(wrong)[:4]]
    if not shown:
        return None
    return f"{case.name}: {int(wrong.sum())} of {wrong.size} elements wrong: {'; '.join(shown)}"


def _within(values: np.ndarray, want: np.ndarray, case: Case) -> np.ndarray:
    kind, amount = case.compare.split()
    with np.errstate(invalid="ignore", over="ignore"):
        same = (values == want) | (np.isnan(values) & np.isnan(want))
        error = np.abs(values - want)
        if kind == "abs":
            return same | (error <= float(amount))
        if kind == "rel":
            return same | (error <= float(amount) * np.abs(want))
        spacing = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
        return same | (error <= float(amount) * spacing)
