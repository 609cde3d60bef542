"""Instructions between the lanes of a warp, and control flow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from warpcheck_cases.opcodes.case import Case, Inputs, element_address, entry


def _words(count: int, low: int = 0, high: int = 2**32) -> Callable[[np.random.Generator], Inputs]:
    return lambda rng: tuple(rng.integers(low, high, 32, dtype=np.uint64).astype(np.uint32) for _ in range(count))


def _case(
    name: str,
    code: str,
    expected: Callable[..., np.ndarray],
    inputs: Callable[[np.random.Generator], Inputs] | None = None,
    target: str = "sm_80",
) -> Case:
    """One warp: %r0, %r1 are this lane's inputs, %r9 its output."""
    inputs = inputs or _words(2)
    body = "\n".join(
        [
            element_address("%in0", "%d0", 4),
            "  ld.global.b32 %r0, [%d0];",
            element_address("%in1", "%d0", 4),
            "  ld.global.b32 %r1, [%d0];",
            code,
            element_address("%out", "%d0", 4),
            "  st.global.b32 [%d0], %r9;",
        ]
    )
    chips = ("sm_80", "sm_90a", "sm_100a") if target == "sm_80" else ("sm_90a", "sm_100a")
    return Case(name, entry(target, body, pointers=2), inputs, expected, target=target, chips=chips)


def _shuffle(mode: str, clamp: int, mask: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """shfl.sync: source lane by mode within segments of the warp; out of range keeps the own value.

    The result is the value plus the predicate in bit 31 of a second word, folded by xor into one.
    """

    def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = np.empty(32, np.uint32)
        for lane in range(32):
            step = int(b[lane]) & 31
            max_lane = (lane & mask) | (clamp & ~mask)
            if mode == "up":
                j, valid = lane - step, lane - step >= max_lane
            elif mode == "down":
                j, valid = lane + step, lane + step <= max_lane
            elif mode == "bfly":
                j, valid = lane ^ step, lane ^ step <= max_lane
            else:
                j = (lane & mask) | (step & ~mask & 31)
                valid = j <= max_lane
            value = int(a[j if valid else lane]) & 0x7FFFFFFF
            out[lane] = value | (0x80000000 if valid else 0)
        return out

    return expected


def _shuffles() -> list[Case]:
    cases = []
    for mode in ("up", "down", "bfly", "idx"):
        for width in (32, 8):
            clamp = 0 if mode == "up" else 31
            control = clamp | (32 - width) << 8
            code = (
                "  and.b32 %r2, %r0, 0x7fffffff;\n"
                f"  shfl.sync.{mode}.b32 %r3|%p0, %r2, %r1, {control:#x}, 0xffffffff;\n"
                "  selp.b32 %r4, 0x80000000, 0, %p0;\n  or.b32 %r9, %r3, %r4;"
            )
            oracle = _shuffle(mode, clamp, 32 - width)
            cases.append(_case(f"shfl.sync.{mode}.b32 width {width}", code, oracle))
    return cases


def _votes() -> list[Case]:
    def votes(a: np.ndarray) -> np.ndarray:
        return (a & 1).astype(bool)

    flag = "  and.b32 %r2, %r0, 1; setp.ne.b32 %p0, %r2, 0;\n"

    def full(value: int) -> np.ndarray:
        return np.full(32, value, np.uint32)

    def half(value: bool) -> Callable[[np.random.Generator], Inputs]:
        return lambda rng: (np.full(32, value, np.uint32), rng.integers(0, 9, 32).astype(np.uint32))

    ballot = lambda a, b: full(sum(1 << i for i in range(32) if votes(a)[i]))  # noqa: E731
    cases = [_case("vote.sync.ballot.b32", flag + "  vote.sync.ballot.b32 %r9, %p0, 0xffffffff;", ballot)]
    for mode, function in (("all", np.all), ("any", np.any)):
        code = flag + f"  vote.sync.{mode}.pred %p1, %p0, 0xffffffff;\n  selp.b32 %r9, 1, 0, %p1;"
        oracle = lambda a, b, f=function: full(int(f(votes(a))))  # noqa: E731
        cases += [
            _case(f"vote.sync.{mode}.pred", code, oracle),
            _case(f"vote.sync.{mode}.pred of ones", code, oracle, half(True)),
            _case(f"vote.sync.{mode}.pred of zeros", code, oracle, half(False)),
        ]
    uniform = flag + "  vote.sync.uni.pred %p1, %p0, 0xffffffff;\n  selp.b32 %r9, 1, 0, %p1;"
    oracle = lambda a, b: full(int(len(set(votes(a).tolist())) == 1))  # noqa: E731
    cases += [
        _case("vote.sync.uni.pred", uniform, oracle),
        _case("vote.sync.uni.pred of ones", uniform, oracle, half(True)),
    ]
    # Only the lanes of the member mask vote; the others take another path.
    subset = (
        flag + "  setp.lt.u32 %p2, %i, 12;\n  mov.u32 %r9, 7;\n  @!%p2 bra DONE;\n"
        "  vote.sync.ballot.b32 %r9, %p0, 0xfff;\nDONE:"
    )
    cases.append(
        _case(
            "vote.sync.ballot.b32 of a subset",
            subset,
            lambda a, b: np.where(np.arange(32) < 12, sum(1 << i for i in range(12) if votes(a)[i]), 7).astype(
                np.uint32
            ),
        )
    )
    return cases


def _matches() -> list[Case]:
    few = _words(2, 0, 4)

    def any_(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.array([sum(1 << j for j in range(32) if a[j] == x) for x in a], np.uint32)

    elect = "  mov.u32 %r9, 0;\n  elect.sync %r2|%p0, 0xffffffff;\n  @%p0 mov.u32 %r9, 1;"
    active = "  setp.lt.u32 %p0, %i, 5;\n  mov.u32 %r9, 0;\n  @!%p0 bra OUT;\n  activemask.b32 %r9;\nOUT:"
    return [
        _case("match.any.sync.b32", "  match.any.sync.b32 %r9, %r0, 0xffffffff;", any_, few),
        _case("elect.sync", elect, lambda a, b: (np.arange(32) == 0).astype(np.uint32), target="sm_90a"),
        _case("activemask.b32", active, lambda a, b: np.where(np.arange(32) < 5, 31, 0).astype(np.uint32)),
    ]


def _reductions() -> list[Case]:
    signed = lambda a: a.view(np.int32)  # noqa: E731
    operations = {
        "add.s32": lambda a: np.sum(a, dtype=np.uint32),
        "add.u32": lambda a: np.sum(a, dtype=np.uint32),
        "min.s32": lambda a: np.min(signed(a)).view(np.uint32),
        "max.s32": lambda a: np.max(signed(a)).view(np.uint32),
        "min.u32": np.min,
        "max.u32": np.max,
        "and.b32": np.bitwise_and.reduce,
        "or.b32": np.bitwise_or.reduce,
        "xor.b32": np.bitwise_xor.reduce,
    }
    return [
        _case(
            f"redux.sync.{name}",
            f"  redux.sync.{name} %r9, %r0, 0xffffffff;",
            lambda a, b, f=function: np.full(32, f(a), np.uint32),
        )
        for name, function in operations.items()
    ]


def _control() -> list[Case]:
    """Loops whose trip count differs by lane, nested branches, predicated execution and early exit."""
    loop = (
        "  and.b32 %r2, %r0, 15;\n  mov.u32 %r9, 0;\n  mov.u32 %r3, 0;\nTOP:\n  setp.ge.u32 %p0, %r3, %r2;\n"
        "  @%p0 bra END;\n  add.u32 %r9, %r9, %r1;\n  add.u32 %r3, %r3, 1;\n  bra TOP;\nEND:"
    )
    nested = (
        "  and.b32 %r2, %r0, 1;\n  and.b32 %r3, %r0, 2;\n  setp.ne.b32 %p0, %r2, 0;\n  setp.ne.b32 %p1, %r3, 0;\n"
        "  @%p0 bra ODD;\n  @%p1 bra EVEN2;\n  mov.u32 %r9, 10;\n  bra JOIN;\nEVEN2:\n  mov.u32 %r9, 11;\n  bra JOIN;\n"
        "ODD:\n  @%p1 bra ODD2;\n  mov.u32 %r9, 20;\n  bra JOIN;\nODD2:\n  mov.u32 %r9, 21;\nJOIN:\n"
        "  shfl.sync.bfly.b32 %r4, %r9, 1, 31, 0xffffffff;\n  mad.lo.u32 %r9, %r9, 100, %r4;"
    )

    def nested_oracle(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        own = np.where(a & 1, 20, 10) + np.where(a & 2, 1, 0)
        return (own * 100 + own[np.arange(32) ^ 1]).astype(np.uint32)

    table = "  and.b32 %r2, %r0, 3;\n  ts: .branchtargets A0, A1, A2, A3;\n"
    table += "  brx.idx %r2, ts;\n"
    table += "".join(f"A{i}:\n  mov.u32 %r9, {i * i + 3};\n  bra AFTER;\n" for i in range(4)) + "AFTER:"
    select = "  setp.lt.s32 %p0, %r0, %r1;\n  @%p0 mov.u32 %r9, %r1;\n  @!%p0 mov.u32 %r9, %r0;"
    mask = (
        "  mov.u32 %r2, %lanemask_lt;\n  mov.u32 %r3, %laneid;\n  popc.b32 %r5, %r2;\n  mad.lo.u32 %r9, %r5, 64, %r3;"
    )
    return [
        _case("bra divergent loop", loop, lambda a, b: ((a & 15) * b).astype(np.uint32)),
        _case("bra nested, converge at shfl", nested, nested_oracle),
        _case("brx.idx", table, lambda a, b: ((a & 3) ** 2 + 3).astype(np.uint32)),
        _case("predicated mov", select, lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32)),
        _case("lane registers", mask, lambda a, b: (np.arange(32) * 65).astype(np.uint32)),
    ]


CASES = [*_shuffles(), *_votes(), *_matches(), *_reductions(), *_control()]
