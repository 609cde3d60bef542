"""What the compiler made of a kernel, read from its machine code: no GPU needed.

    python -m bench.static KERNEL.cubin ...          # a table of registers, spills, shared memory, loops
    python -m bench.static --compile [--peer DIR]    # compile our named forwards (and flash-attn-4's) first, timed
    python -m bench.static --compile --cases d128_full_bwd_pair d128_full_bwd_single [--peer DIR]    # or backwards
    python -m bench.static --compile --cases sm90_d128_full sm90_few sm90_d128_full_bwd    # of the Hopper kernels

A loop is a backward branch with no other loop inside. It is named by what it contains: `softmax` (exp2 of a row's
elements), `masked` (the same with selects), `mma` (matrix instructions), `correction` (tensor memory loaded and
stored). Our backward's loop holds two such bodies, one masked, of which a step runs one.
Where one of ours spills registers, has lost its setmaxnreg, or waits after every wgmma (what ptxas warns of as C7508
and C7510 to C7518), that is said, and the exit status is 1.
`--peer DIR` names a directory with unpacked flash-attn-4 and quack wheels; it is compiled in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest.mock
from collections import Counter
from pathlib import Path

from warpcheck.timing.sass.code import disassemble

_WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT"
_FENCE, _DRAIN = "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR"  # around wgmma
COUNTED = (
    "MUFU.EX2", "FFMA2", "FADD2", "F2FP", "FMNMX3", "FMNMX", "FSEL", "UTCHMMA", "HGMMA", _FENCE, _DRAIN, "LDL", "STL",
    _WAIT,
)  # fmt: skip
SHOWN = {_WAIT: "barrier waits", _FENCE: "wgmma fences", _DRAIN: "wgmma waits"}
CASES = {  # name: (head_dim, head_dim_v, causal)
    "d128_full": (128, 128, False),
    "d128_causal": (128, 128, True),
    "d64_full": (64, 64, False),
    "d64_causal": (64, 64, True),
    "d192_128_causal": (192, 128, True),
}
BACKWARD_CASES = {  # name: (case, CTAs that work together)
    f"{name}_bwd_{row}": (name, ctas)
    for name in ("d128_full", "d128_causal")
    for row, ctas in (("single", 1), ("pair", 2))
}
FEW_CASES = {"d128_few": (128, 128), "d64_few": (64, 64)}  # one query of 32/8 heads: (head_dim, head_dim_v)
SM90_CASES = {  # name: (head_dim, head_dim_v, causal, direction)
    **{f"sm90_{name}": (*case, "fwd") for name, case in CASES.items()},
    "sm90_d96_causal": (96, 96, True, "fwd"),
    "sm90_d256_full": (256, 256, False, "fwd"),
    "sm90_few": (128, 128, True, "few"),
    **{f"sm90_{name}_bwd": (*CASES[name], "bwd") for name in ("d128_full", "d128_causal", "d64_causal")},
    "sm90_d192_128_causal_bwd": (192, 128, True, "bwd"),
    "sm90_d256_full_bwd": (256, 256, False, "bwd"),
}


_FEW_KEYS = 32768


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop: how many instructions, and which."""

    name: str
    instructions: int
    counts: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel function of a cubin.

    registers: a thread's at launch, then what each role asks for. local: instructions that touch spilled registers.
    products, fences: wgmma, and what stands before groups of them that may be in flight together.
    """

    name: str
    registers: str
    local: int
    instructions: int
    loops: tuple[Loop, ...]
    products: int = 0
    fences: int = 0


def kernels(cubin: Path) -> list[Kernel]:
    """The kernels of a cubin."""
    text = disassemble(cubin, "-c")
    counts = r"EIATTR_REGCOUNT.*?index@\((\S+)\).*?\.word\s+(0x\w+)"
    at_launch = {name: int(n, 16) for name, n in re.findall(counts, disassemble(cubin, "-hex"), flags=re.S)}
    found = []
    for section in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.M)[1:]:
        labels, code = _listing(section)
        local = sum(_opcode(line).startswith(("LDL", "STL")) for line in code)
        name = re.split(r"[,\s]", section, maxsplit=1)[0]
        roles = [int(line.split()[-1], 16) for line in code if "USETMAXREG" in line]
        registers = "/".join(map(str, [at_launch.get(name, "?"), *dict.fromkeys(roles)]))
        products, fences = (sum(_opcode(line).startswith(key) for line in code) for key in ("HGMMA", _FENCE))
        found.append(Kernel(name, registers, local, len(code), _loops(labels, code), products, fences))
    return found


def problems(kernel: Kernel, has_roles: bool = True) -> list[str]:
    """What must not be, in words. has_roles: warpgroups ask for registers of their own."""
    found = []
    if kernel.local:
        found.append(f"{kernel.local} instructions touch spilled registers")
    if has_roles and "/" not in kernel.registers:
        found.append("no setmaxnreg is left")
    if 2 * kernel.fences > kernel.products > 0:
        found.append(f"wgmma is serialised: {kernel.fences} fences around {kernel.products} products")
    return found


def _listing(section: str) -> tuple[dict[str, int], list[str]]:
    """Label -> index of the next instruction, and the instructions."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in section.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return labels, code


def _opcode(instruction: str) -> str:
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]


def _loops(labels: dict[str, int], code: list[str]) -> tuple[Loop, ...]:
    spans = []
    for at, instruction in enumerate(code):
        target = re.search(r"`\((\.L_\w+)\)", instruction)
        if _opcode(instruction).startswith("BRA") and target and labels.get(target[1], at + 1) <= at:
            spans.append((labels[target[1]], at))
    loops = []
    for first, last in spans:
        counts = Counter()
        for line in code[first : last + 1]:
            counts.update(key for key in COUNTED if _opcode(line) == key or _opcode(line).startswith(key + "."))
            counts.update(key for key in ("LDTM", "STTM") if _opcode(line).startswith(key))
        holds_another = any(first <= a and b <= last and (a, b) != (first, last) and b - a > 60 for a, b in spans)
        name = _loop_name(counts)
        if name and not holds_another:
            loops.append(Loop(name, last - first + 1, dict(counts)))
    return tuple(loops)


def _loop_name(counts: Counter) -> str:
    if counts["MUFU.EX2"] >= 32:
        return "masked" if counts["FSEL"] >= 64 else "softmax"
    if counts["UTCHMMA"] + counts["HGMMA"] >= 8:
        return "mma"
    return "correction" if counts["LDTM"] and counts["STTM"] else ""


def table(rows: list[tuple[str, Kernel]]) -> str:
    """Markdown: one line per kernel and loop."""
    lines = [
        "| kernel | regs | spills | code | loop | instructions | "
        + " | ".join(SHOWN.get(key, key) for key in COUNTED)
        + " |",
        "|---|" + "--:|" * 3 + "---|" + "--:|" * (len(COUNTED) + 1),
    ]
    for name, kernel in rows:
        for loop in kernel.loops:
            counts = " | ".join(str(loop.counts.get(key, 0)) for key in COUNTED)
            head = f"| {name} | {kernel.registers} | {kernel.local} | {kernel.instructions}"
            lines.append(f"{head} | {loop.name} | {loop.instructions} | {counts} |")
    return "\n".join(lines)


def compile_ours(name: str, directory: Path) -> tuple[Path, float]:
    """Compile one of our named forwards or backwards; (cubin, seconds)."""
    import torch

    if name in SM90_CASES:
        return _compile_sm90(name, directory)

    from fa4.runtime.device import chip_by_number
    from fa4.runtime.spec import AttentionSpec, ProblemSize
    from fa4.sm100.bwd import plan as backward
    from fa4.sm100.bwd.tiles import PAIR, SINGLE
    from fa4.sm100.fwd import plan as forward

    case, ctas = BACKWARD_CASES.get(name, (name, None))
    d, dv, causal = CASES[case] if name not in FEW_CASES else (*FEW_CASES[name], True)
    heads = (32, 8) if name in FEW_CASES else (16, 16)
    spec = AttentionSpec(torch.bfloat16, d, dv, *heads, d**-0.5, window_right=0 if causal else None)
    chip = chip_by_number(100)
    begin = time.perf_counter()
    if name in FEW_CASES:
        compiled = forward.Sm100Forward.kernel.compile(
            forward.Sm100Forward(spec, ProblemSize(1, 1, _FEW_KEYS), chip).cfg, chip
        )
    elif ctas is None:
        compiled = forward.Sm100Forward.kernel.compile(forward.configure(spec, chip), chip)
    else:
        tiles = PAIR if ctas == 2 else SINGLE
        compiled = backward.KERNEL.compile(backward.configure(spec, chip, has_dlse=False, tiles=tiles), chip)
    seconds = time.perf_counter() - begin
    path = directory / f"ours_{name}.cubin"
    path.write_bytes(compiled.__cubin__)
    return path, seconds


def _compile_sm90(name: str, directory: Path) -> tuple[Path, float]:
    import torch

    from fa4.runtime.device import chip_by_number
    from fa4.runtime.spec import AttentionSpec, ProblemSize
    from fa4.sm90.plan import Plan

    d, dv, causal, direction = SM90_CASES[name]
    heads, rows, keys = ((32, 8), 1, _FEW_KEYS) if direction == "few" else ((16, 16), 4096, 4096)
    spec = AttentionSpec(torch.bfloat16, d, dv, *heads, d**-0.5, window_right=0 if causal else None)
    chip = chip_by_number(90)
    plan = Plan(spec, ProblemSize(1, rows, keys), chip)
    begin = time.perf_counter()
    if direction == "bwd":
        compiled = plan._backward.kernel.compile(plan._backward.config(has_dlse=False), chip)
    else:
        compiled = plan._forward.kernel.compile(plan._forward.cfg, chip)
    seconds = time.perf_counter() - begin
    path = directory / f"ours_{name}.cubin"
    path.write_bytes(compiled.__cubin__)
    return path, seconds


def compile_peer(name: str, directory: Path, peer: Path) -> tuple[Path, float]:
    """Compile flash-attn-4's forward or backward on fake tensors; (cubin, seconds)."""
    import cutlass
    import torch
    import torch._inductor.standalone_compile
    from torch._subclasses.fake_tensor import FakeTensorMode

    sys.path.insert(0, str(peer))
    for name_of in ("triton", "triton.language", "einops"):  # imported for its autotuner and its tests only
        if not _can_import(name_of):
            sys.modules[name_of] = _Anything(name_of)
    case, ctas = BACKWARD_CASES.get(name, (name, None))
    os.environ["FA_DISABLE_2CTA"] = str(int(ctas == 1))
    from flash_attn.cute import interface

    d, dv, causal = CASES[case] if name not in FEW_CASES else (*FEW_CASES[name], True)
    rows, keys, heads, heads_kv = (1, _FEW_KEYS, 32, 8) if name in FEW_CASES else (4096, 4096, 16, 16)
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    sm_count = types.SimpleNamespace(get_max_active_clusters=lambda _: 148, get_device_multiprocessor_count=lambda: 148)
    cutlass.utils.HardwareInfo = lambda *_: sm_count
    with FakeTensorMode():
        q = torch.empty(1, rows, heads, d, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(1, keys, heads_kv, n, dtype=torch.bfloat16, device="cuda") for n in (d, dv))
        before = set(directory.glob("*.cubin"))
        begin = time.perf_counter()
        if ctas is None:
            interface._flash_attn_fwd(q, k, v, causal=causal, num_splits=0 if name in FEW_CASES else 1)
        else:
            out, lse = torch.empty_like(v), torch.empty(1, 16, 4096, device="cuda")
            interface._flash_attn_bwd(q, k, v, out, torch.empty_like(v), lse, causal=causal)
        seconds = time.perf_counter() - begin
    # A backward compiles kernels around the main one, too, and split keys one that joins them: smaller ones.
    largest = max(set(directory.glob("*.cubin")) - before, key=lambda path: path.stat().st_size)
    return largest.rename(directory / f"peer_{name}.cubin"), seconds


class _Anything(types.ModuleType):
    """Stands for a module that is imported but not used."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return unittest.mock.MagicMock()


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _in_own_process(who: str, name: str, directory: Path, peer: Path | None) -> tuple[Path, float]:
    """Compile in a fresh process, so that one kernel's imports and settings do not help or hurt another's."""
    arch = "sm_90a" if name in SM90_CASES else "sm_100a"
    env = dict(os.environ, CUTE_DSL_KEEP="cubin", CUTE_DSL_DUMP_DIR=str(directory), CUTE_DSL_ARCH=arch)
    env.update(FLASH_ATTENTION_ARCH="sm_100", FLASH_ATTENTION_FAKE_TENSOR="1", FLASH_ATTENTION_NUM_SMS="148")
    command = [sys.executable, "-m", "bench.static", "--one", who, name, str(directory), str(peer)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling {who} {name} failed:\n{done.stderr[-2000:]}")
    path, seconds = json.loads(done.stdout.splitlines()[-1])
    return Path(path), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", nargs="*", type=Path, help="cubin files")
    parser.add_argument("--compile", action="store_true", help="compile the named cases first, ours and the peer's")
    names = [*sorted(CASES), *FEW_CASES, *sorted(BACKWARD_CASES), *SM90_CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=sorted(CASES), help="which of them")
    parser.add_argument("--peer", type=Path, help="directory with flash_attn (flash-attn-4) and quack")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        who, name, directory, peer = args.one
        run = compile_ours if who == "ours" else lambda *a: compile_peer(*a, Path(peer))
        path, seconds = run(name, Path(directory))
        print(json.dumps([str(path), seconds]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        cubins = [(path.stem, path) for path in args.cubins]
        if args.compile:
            print("| case | compile, s |\n|---|--:|")
            for name in args.cases:
                for who in ("ours", "peer") if args.peer else ("ours",):
                    path, seconds = _in_own_process(who, name, Path(scratch), args.peer)
                    cubins.append((f"{who} {name}", path))
                    print(f"| {who} {name} | {seconds:.1f} |", flush=True)
            print()
        rows = [(name, kernel) for name, path in cubins for kernel in kernels(path)]
        print(table(rows))
        # Of a backward, the kernels around the main one have no roles; nor has Hopper's forward of few queries.
        wrong = [
            f"{name}, {kernel.name}: {problem}"
            for name, kernel in rows
            if name.startswith("ours")
            for problem in problems(kernel, has_roles="sm90_few" not in name and kernel.products > 0)
        ]
        if wrong:
            raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
