"""wgmma: clocks of a batch by its size, A from shared memory or registers, alone and while TMA fills shared memory."""

from __future__ import annotations

import torch

from .frame import Bench, Section, init, timed, wait

BATCHES = (1, 2, 3, 4, 16)  # products in flight
COLUMNS = (8, 32, 64, 128, 256)
ODD_COLUMNS = (40, 48, 80, 96, 160, 192)  # what tiles of attention make of them
CHIPS = ("sm_90a",)
_A_BYTES, _B_BYTES = 4096, 8192  # room for 64 x 16 and 256 x 16 elements of bf16
_DEPTH = 16.0  # what a product of ones adds
_ONE = "0x3F803F80"


def _operands(columns: int) -> str:
    """Registers of D, and descriptors of operands without swizzle: 8 x 8 elements lie together, 128 bytes apart along
    the reduction and 256 along the rows."""
    sums = ", ".join(f"d{i}" for i in range(columns // 2))
    return f".reg .f32 {sums}; .reg .b32 one, place, c, a0, a1, a2, a3; .reg .b64 a, b, wide, out; .reg .pred on;"


def _descriptor(name: str, address: str) -> str:
    return _at(name, address, (128 >> 4) << 16 | (256 >> 4) << 32)


def _at(name: str, address: str, bits: int) -> str:
    """The descriptor of an operand at an address."""
    return (
        f"shr.u32 c, {address}, 4; and.b32 c, c, 0x3FFF; cvt.u64.u32 wide, c; mov.b64 {name}, {bits:#x};"
        f"or.b64 {name}, {name}, wide;"
    )


_SWIZZLED_A, _SWIZZLED_B = 8192, 16384  # room for 64 x 64 and 128 x 64 elements in lines of 128 bytes


def _swizzled(name: str, address: str, transposed: bool) -> str:
    """A descriptor of lines of 128 bytes in a swizzle of their own. Along the reduction: 8 lines are 1024 bytes, and so
    far apart are the next 8 rows. transposed: a line lies across the rows, and 8 steps of the reduction take 1024
    bytes; the next 64 rows come after 16 of them."""
    apart = 2048 if transposed else 16
    bits = (apart >> 4) << 16 | (1024 >> 4) << 32 | 1 << 62
    return _at(name, address, bits)


def _prepare_swizzled(columns: int, transposed: tuple[bool, bool]) -> str:
    """As `_prepare`."""
    a, b = _swizzled("a", "room", transposed[0]), _swizzled("b", "place", transposed[1])
    return _filled(columns, _SWIZZLED_A, _SWIZZLED_B, a, b)


def _prepare(columns: int) -> str:
    """Ones into both operands, zeros into D."""
    return _filled(columns, _A_BYTES, _B_BYTES, _descriptor("a", "room"), _descriptor("b", "place"))


def _filled(columns: int, a_bytes: int, b_bytes: int, a: str, b: str) -> str:
    """PTX of `_prepare`. a, b: that of the operands' descriptors."""
    zeros = "".join(f"mov.f32 d{i}, 0f00000000;" for i in range(columns // 2))
    return f"""
    mov.b32 one, {_ONE}; shl.b32 c, thread, 4; add.u32 place, room, c;
    FILL: st.shared.v4.b32 [place], {{one, one, one, one}};
    add.u32 place, place, 2048; add.u32 c, c, 2048; setp.lt.u32 p, c, {a_bytes + b_bytes}; @p bra FILL;
    fence.proxy.async.shared::cta; bar.sync 0; setp.ne.b32 on, one, 0; ld.shared.v4.b32 {{a0, a1, a2, a3}}, [room];
    {a} add.u32 place, room, {a_bytes};
    {b} {zeros}
    """


def _products(columns: int, n: int, registers: bool = False, transposed: tuple[bool, bool] = (False, False)) -> str:
    """PTX of n products in a group of their own. transposed: A and B in shared memory lie across the reduction."""
    sums = ", ".join(f"d{i}" for i in range(columns // 2))
    a, b = map(int, transposed)
    first, flags = ("{a0, a1, a2, a3}", f"on, 1, 1, {b}") if registers else ("a", f"on, 1, 1, {a}, {b}")
    shape = f"m64n{columns}k16.f32.bf16.bf16"
    product = f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, {first}, b, {flags};\n"
    return f"wgmma.fence.sync.aligned;\n{product * n}wgmma.commit_group.sync.aligned;\n"


_DRAIN = "wgmma.wait_group.sync.aligned 0;"


def _keep(columns: int) -> str:
    """The first sum of each thread into memory, the others used."""
    total = "".join(f"add.f32 d0, d0, d{i};" for i in range(1, columns // 2))
    scale = torch.tensor(2.0 / columns).view(torch.int32).item()
    return f"{total} mul.f32 d0, d0, 0f{scale:08X}; mad.wide.u32 out, thread, 4, data; st.global.b32 [out], d0;"


def _law(columns: int, registers: bool) -> Bench:
    sections = tuple(Section(f"{n} in flight", 1, "batch") for n in BATCHES)
    body = "".join(
        timed(i, _products(columns, n, registers) + _DRAIN, together=False) for i, n in enumerate(BATCHES)
    )  # fmt: skip
    return Bench(
        f"wgmma m64n{columns}k16, A from {'registers' if registers else 'shared memory'}", sections, body,
        lambda: torch.zeros(128), lambda before, rounds: torch.full((128,), _DEPTH * sum(BATCHES) * rounds),
        declared=_operands(columns), before=_prepare(columns), after=_keep(columns),
        smem_bytes=_A_BYTES + _B_BYTES, chips=CHIPS, notes={"columns": columns, "registers": registers},
    )  # fmt: skip


def _layout(columns: int, registers: bool, transposed: tuple[bool, bool]) -> Bench:
    """Operands in lines of 128 bytes, as TMA brings them."""
    lies = [f"{name} transposed" for name, is_so in zip("AB", transposed) if is_so]
    where = ", ".join([f"A from {'registers' if registers else 'shared memory'}", "swizzled", *lies])
    sections = tuple(Section(f"{n} in flight", 1, "batch") for n in BATCHES)
    body = "".join(
        timed(i, _products(columns, n, registers, transposed) + _DRAIN, together=False) for i, n in enumerate(BATCHES)
    )
    return Bench(
        f"wgmma m64n{columns}k16, {where}", sections, body,
        lambda: torch.zeros(128), lambda before, rounds: torch.full((128,), _DEPTH * sum(BATCHES) * rounds),
        declared=_operands(columns), before=_prepare_swizzled(columns, transposed), after=_keep(columns),
        smem_bytes=_SWIZZLED_A + _SWIZZLED_B, chips=CHIPS, notes={"columns": columns, "registers": registers},
    )  # fmt: skip


LAYOUTS = (  # whether A comes from registers, and which operands are transposed
    (False, (False, False)), (False, (True, False)), (False, (False, True)), (False, (True, True)),
    (True, (False, True)),
)  # fmt: skip

_STEPS, _LOAD_BYTES, _LOADS = 16, 16384, 8


def _beside(columns: int) -> Bench:
    """A warpgroup multiplies, one more warp fills other shared memory by bulk copies: alone and at once."""
    products = _products(columns, _STEPS) + _DRAIN
    target, parity = _A_BYTES + _B_BYTES, "parity"

    def loads(phase: int) -> str:
        one = f"""
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], {_LOAD_BYTES * _LOADS};
        """ + "".join(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[room+{target + _LOAD_BYTES * i}], [data+512], {_LOAD_BYTES}, [smem];\n"
            for i in range(_LOADS)
        )
        return one + wait("smem", parity, f"FILLED{phase}") + f"xor.b32 {parity}, {parity}, 1;"

    body = ""
    for phase, (multiply, load) in enumerate(((True, False), (False, True), (True, True))):
        slots = {0: (0, None), 1: (None, 1), 2: (2, 3)}[phase]
        body += f"""
        bar.sync 0;
        mov.u64 start, %clock64;
        @loader bra LOADER{phase};
        {products if multiply else ""}
        mov.u64 stop, %clock64; sub.u64 t, stop, start;
        {f"@first st.global.b64 [row+{8 * slots[0]}], t;" if multiply else ""}
        bra JOIN{phase};
        LOADER{phase}:
        {f"@!alone bra JOIN{phase};" + loads(phase) if load else ""}
        mov.u64 stop, %clock64; sub.u64 t, stop, start;
        {f"@alone st.global.b64 [row+{8 * slots[1]}], t;" if load else ""}
        JOIN{phase}:
        bar.sync 0;
        """
    sections = (
        Section("products alone", _STEPS, "product"), Section("loads alone", _LOADS * _LOAD_BYTES / 1024, "KiB"),
        Section("products beside loads", _STEPS, "product"),
        Section("loads beside products", _LOADS * _LOAD_BYTES / 1024, "KiB"),
    )  # fmt: skip

    def initial() -> torch.Tensor:
        return torch.cat([torch.zeros(128), torch.ones(_LOAD_BYTES // 4)])

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        after = before.clone()
        after[:128] = _DEPTH * _STEPS * 2 * rounds
        return after

    return Bench(
        f"wgmma m64n{columns}k16 beside bulk loads", sections, body, initial, expected,
        declared=_operands(columns) + ".reg .b32 parity; .reg .pred loader, alone;",
        before=f"mov.b32 parity, 0; setp.ge.u32 loader, thread, 128; setp.eq.u32 alone, thread, 128; {init(1)}"
               + _prepare(columns).replace("2048", "2560"),
        after=f"@loader bra DONE; {_keep(columns)} DONE:", threads=160,
        smem_bytes=target + _LOADS * _LOAD_BYTES, chips=CHIPS, notes={"columns": columns},
    )  # fmt: skip


def _together(columns: int, registers: bool) -> Bench:
    """Two warpgroups multiply at the same time."""
    groups = 2
    return Bench(
        f"wgmma m64n{columns}k16 of two warpgroups, A from {'registers' if registers else 'shared memory'}",
        (Section("products", groups * _STEPS, "product"),), timed(0, _products(columns, _STEPS, registers) + _DRAIN),
        lambda: torch.zeros(128 * groups), lambda before, rounds: torch.full_like(before, _DEPTH * _STEPS * rounds),
        declared=_operands(columns), before=_prepare(columns).replace("2048", "4096"), after=_keep(columns),
        threads=128 * groups, smem_bytes=_A_BYTES + _B_BYTES, chips=CHIPS,
    )  # fmt: skip


_CHAINS = 8
_ARITHMETIC = {
    "fma": ("fma.rn.f32 {x}, {x}, by, by;", 128),
    "fma of three registers": ("fma.rn.f32 {x}, {x}, by, of;", 128),
    "mul by a constant": ("mul.rn.f32 {x}, {x}, 0f3F8147AE;", 128),
    "add": ("add.rn.f32 {x}, {x}, by;", 128),
    "max": ("max.f32 {x}, {x}, by;", 64),
    "cvt": ("cvt.rn.bf16x2.f32 packed, {x}, by; mov.b32 {x}, packed;", 64),
    "ex2": ("ex2.approx.ftz.f32 {x}, {x};", 24),
    "fma and ex2": ("fma.rn.f32 {x}, {x}, by, of; ex2.approx.ftz.f32 {x}, {x};", 20),
    "softmax": (
        "max.f32 {x}, {x}, by; fma.rn.f32 {x}, {x}, by, of; ex2.approx.ftz.f32 {x}, {x}; add.rn.f32 {x}, {x}, by;"
        "cvt.rn.bf16x2.f32 packed, {x}, by; mov.b32 {x}, packed;", 20,
    ),
    "stores of 16 bytes": ("st.volatile.shared.v4.f32 [spot], {{{x}, {x}, {x}, {x}}};", 16),
    "loads of 16 bytes": (  # of zeros: the next address depends on what was loaded, so that no two are one
        "ld.shared.v4.b32 {{m{x}0, m{x}1, m{x}2, m{x}3}}, [at{x}]; add.u32 at{x}, at{x}, m{x}3;", 16,
    ),
}  # fmt: skip


def _beside_arithmetic(columns: int, registers: bool, name: str) -> Bench:
    """One warpgroup multiplies while another computes with its own registers: alone and at once."""
    text, steps = _ARITHMETIC[name]
    names = [f"x{i}" for i in range(_CHAINS)]
    many = "\n".join(text.format(x=x) for _ in range(steps) for x in names)
    body, parts = "", (("products", _products(columns, _STEPS, registers) + _DRAIN), (name, many))
    for phase, running in enumerate(((0,), (1,), (0, 1))):
        code = [parts[i][1] if i in running else "" for i in (0, 1)]
        slots = [2 * (phase == 2) + i for i in (0, 1)]
        body += f"""
        bar.sync 0;
        mov.u64 start, %clock64;
        @second bra SECOND{phase};
        {code[0]}
        mov.u64 stop, %clock64; sub.u64 t, stop, start;
        {f"@first st.global.b64 [row+{8 * slots[0]}], t;" if 0 in running else ""}
        bra JOIN{phase};
        SECOND{phase}:
        {code[1]}
        mov.u64 stop, %clock64; sub.u64 t, stop, start;
        {f"@alone st.global.b64 [row+{8 * slots[1]}], t;" if 1 in running else ""}
        JOIN{phase}:
        bar.sync 0;
        """
    counts = ((_STEPS, "product"), (_CHAINS * steps, "instruction"))
    sections = tuple(
        Section(f"{parts[i][0]} {how}", *counts[i]) for how in ("alone", "beside the other") for i in (0, 1)
    )  # fmt: skip

    def expected(before: torch.Tensor, rounds: int) -> torch.Tensor:
        return torch.full((128,), _DEPTH * _STEPS * 2 * rounds)

    total = "".join(f"add.f32 by, by, {x}; mov.b32 of, at{x}; add.f32 by, by, of;" for x in names)
    start = "".join(
        f"cvt.rn.f32.u32 {x}, thread; add.f32 {x}, {x}, 0f{torch.tensor(float(i)).view(torch.int32).item():08X};"
        for i, x in enumerate(names)
    )
    return Bench(
        f"wgmma m64n{columns}k16, A from {'registers' if registers else 'shared memory'}, beside {name}", sections,
        body, lambda: torch.zeros(128), expected,
        declared=_operands(columns)
                 + f".reg .b32 packed, spot; .reg .f32 by, of, {', '.join(names)};"
                 f".reg .b32 {', '.join(f'at{x}, m{x}0, m{x}1, m{x}2, m{x}3' for x in names)};"
                 ".reg .pred second, alone;",
        before="setp.ge.u32 second, thread, 128; setp.eq.u32 alone, thread, 128;"
               + _prepare(columns).replace("2048", "4096") + start
               + "ld.global.f32 by, [data]; ld.global.f32 of, [data+4];"
               + "shl.b32 spot, thread, 4; add.u32 spot, spot, room;"
               + f"add.u32 spot, spot, {_A_BYTES + _B_BYTES}; st.shared.v4.f32 [spot], {{of, of, of, of}}; bar.sync 0;"
               + "".join(f"ld.shared.b32 at{x}, [spot+{4 * (i % 4)}]; add.u32 at{x}, at{x}, spot;"
                         for i, x in enumerate(names)),
        # Their sum is never this one, which the compiler cannot know.
        after=f"{total} setp.eq.f32 p, by, 0fBF800000; @p st.global.f32 [data], by; @second bra DONE; {_keep(columns)}"
              "DONE:",
        threads=256, smem_bytes=_A_BYTES + _B_BYTES + 4096, chips=CHIPS,
    )  # fmt: skip


BENCHES = (
    *(_law(columns, registers) for columns in (*COLUMNS, *ODD_COLUMNS) for registers in (False, True)),
    *(_layout(columns, *layout) for columns in (96, 128) for layout in LAYOUTS), _beside(128), _beside(256),
    *(_together(columns, registers) for columns in (64, 128, 256) for registers in (False, True)),
    *(_beside_arithmetic(128, False, name) for name in _ARITHMETIC),
    *(_beside_arithmetic(128, True, name) for name in ("fma", "softmax", "stores of 16 bytes", "loads of 16 bytes")),
    _beside_arithmetic(256, True, "softmax"),
    *(_beside_arithmetic(256, False, name) for name in ("stores of 16 bytes", "loads of 16 bytes")),
)  # fmt: skip
