"""wgmma: clocks of a batch by its size, A from shared memory or registers, alone and while TMA fills shared memory."""

from __future__ import annotations

import torch

from .frame import Bench, Section, init, timed, wait

BATCHES = (1, 2, 3, 4, 16)  # products in flight
COLUMNS = (8, 32, 64, 128, 256)
CHIPS = ("sm_90a",)
_A_BYTES, _B_BYTES = 4096, 8192  # room for 64 x 16 and 256 x 16 elements of bf16
_DEPTH = 16.0  # what a product of ones adds
_ONE = "0x3F803F80"


def _operands(columns: int) -> str:
    """Registers of D, and descriptors of operands without swizzle: 8 x 8 elements lie together, 128 bytes apart along
    the reduction and 256 along the rows."""
    sums = ", ".join(f"d{i}" for i in range(columns // 2))
    return f".reg .f32 {sums}; .reg .b32 one, place, c; .reg .b64 a, b, wide, out; .reg .pred on;"


def _descriptor(name: str, address: str) -> str:
    bits = (128 >> 4) << 16 | (256 >> 4) << 32
    return (
        f"shr.u32 c, {address}, 4; and.b32 c, c, 0x3FFF; cvt.u64.u32 wide, c; mov.b64 {name}, {bits:#x};"
        f"or.b64 {name}, {name}, wide;"
    )


def _prepare(columns: int) -> str:
    """Ones into both operands, zeros into D."""
    zeros = "".join(f"mov.f32 d{i}, 0f00000000;" for i in range(columns // 2))
    return f"""
    mov.b32 one, {_ONE}; shl.b32 c, thread, 4; add.u32 place, room, c;
    FILL: st.shared.v4.b32 [place], {{one, one, one, one}};
    add.u32 place, place, 2048; add.u32 c, c, 2048; setp.lt.u32 p, c, {_A_BYTES + _B_BYTES}; @p bra FILL;
    fence.proxy.async.shared::cta; bar.sync 0; setp.ne.b32 on, one, 0;
    {_descriptor("a", "room")} add.u32 place, room, {_A_BYTES}; {_descriptor("b", "place")} {zeros}
    """


def _products(columns: int, n: int, registers: bool = False) -> str:
    """PTX of n products in a group of their own."""
    sums = ", ".join(f"d{i}" for i in range(columns // 2))
    first, flags = ("{one, one, one, one}", "on, 1, 1, 0") if registers else ("a", "on, 1, 1, 0, 0")
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
        bar.sync 0; mov.u64 start, %clock64;
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


BENCHES = (
    *(_law(columns, registers) for columns in COLUMNS for registers in (False, True)), _beside(128), _beside(256),
)  # fmt: skip
