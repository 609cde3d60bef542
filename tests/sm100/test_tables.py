"""The tables a Blackwell kernel is built from: what they derive, and what they refuse."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import cutlass

from fa4.sm100.channels import By, Carries, Channel, ChannelTable
from fa4.sm100.fwd.__main__ import tables
from fa4.sm100.mma import Major, SmemOperand, Umma
from fa4.sm100.roles import Role, RoleTable
from fa4.sm100.smem import Region, SmemMap, Tile
from fa4.sm100.tmem import TmemMap, alias_of, cols

ROLES = RoleTable((Role("softmax", (0, 8), 192, teams=2), Role("mma", (8, 9), 64), Role("load", (9, 10), 64)))


def channel(name="mma_softmax_S", producer="mma", consumer="softmax", filled=By.UMMA, freed=By.WARP, stages=2):
    return Channel(name, producer, consumer, filled, freed, stages, Carries.TMEM)


def test_arrivals_follow_from_roles():
    table = ChannelTable(
        (channel(consumer=("softmax", "load")), channel("load_mma_K", "load", "mma", By.TMA, By.UMMA, 3)), ROLES
    )
    s, k = table.channels
    assert table.arrivals(s.filled, s.producers) == 1
    assert table.arrivals(s.freed, s.consumers) == 4 + 1  # one softmax team and the load warp
    assert table.arrivals(k.filled, k.producers) == table.arrivals(k.freed, k.consumers) == 1
    assert table.nbytes == 8 * (2 * 2 + 2 * 3)
    assert table.barrier_names()[:4] == tuple(f"mma_softmax_S.{side}[{i}]" for side in ("full", "free") for i in (0, 1))
    assert table.offset(k) == 4


@pytest.mark.parametrize(
    "rows, complaint",
    [
        ((channel(), channel()), "share a name"),
        ((channel(consumer="reader"),), "no role is named 'reader'"),
        ((channel(stages=0),), "has 0 stages"),
    ],
)
def test_channel_table_refuses(rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        ChannelTable(rows, ROLES)


@pytest.mark.parametrize(
    "role, operation", [("softmax", "commit_full"), ("mma", "arrive_full"), ("softmax", "wait_free")]
)
def test_an_end_refuses_what_its_role_does_not_do(role, operation):
    end = ChannelTable((channel(),), ROLES).ends(role, 0).mma_softmax_S
    arguments = (0, 0) if operation.startswith("wait") else (0,)
    with pytest.raises(ValueError, match=f"mma_softmax_S: {role} is used as a"):
        getattr(end, operation)(*arguments)


def test_a_role_sees_only_its_channels():
    ends = ChannelTable((channel(),), ROLES).ends("load", 0)
    assert not hasattr(ends, "mma_softmax_S")


@pytest.mark.parametrize(
    "roles, complaint",
    [
        ((Role("a", (0, 4), 128), Role("b", (5, 8), 128)), "expected them to start at 4"),
        ((Role("a", (0, 4), 100),), "multiple of 8"),
        ((Role("a", (0, 3), 64), Role("b", (3, 4), 72)), "must agree on regs"),
        ((Role("a", (0, 16), 136),), "the SM has 65536"),
        ((Role("a", (0, 4), 128, teams=3),), "unequal teams"),
    ],
)
def test_role_table_refuses(roles, complaint):
    with pytest.raises(ValueError, match=complaint):
        RoleTable(roles)


def test_idle_warps_complete_the_last_warpgroup():
    assert (ROLES.warpgroups, ROLES.threads) == (3, 384)


def test_tmem_map_knows_its_spans():
    tmem = TmemMap(S=cols(0, 256), P=alias_of("S", 64, offset=64), O=cols(256, 256))
    assert (tmem.S, tmem.P, tmem.O) == (0, 64, 256)


@pytest.mark.parametrize(
    "spans, complaint",
    [
        (dict(S=cols(0, 128), O=cols(100, 128)), "S overlap|O and S"),
        (dict(S=cols(400, 128)), "leaves the 512 columns"),
        (dict(S=cols(0, 64), P=alias_of("S", 64, offset=32)), "does not fit"),
        (dict(P=alias_of("S", 64)), "not declared before"),
    ],
)
def test_tmem_map_refuses(spans, complaint):
    with pytest.raises(ValueError, match=complaint):
        TmemMap(**spans)


def test_smem_map_aligns_and_overlays():
    smem = SmemMap(Region("a", 100), Region("b", 4096, align=1024), Region("c", 10, over="b"), Region("d", 8, align=8))
    assert smem.offsets == {"a": 0, "b": 1024, "c": 1024, "d": 5120}
    assert smem.nbytes == 5128
    with pytest.raises(ValueError, match="does not fit over"):
        SmemMap(Region("a", 100), Region("b", 101, over="a"))


def test_descriptor_steps_follow_the_panels():
    tile = Tile(128, 96)
    assert (tile.panels, tile.panel_bytes, tile.nbytes) == (2, 16384, 32768)
    k_major = SmemOperand(tile, Major.K)
    # 16 elements are 32 bytes within a panel; after 64 elements comes the next panel. Units of 16 bytes.
    assert [k_major.step(k) for k in range(6)] == [0, 2, 4, 6, 1024, 1026]
    mn_major = SmemOperand(tile, Major.MN)
    assert [mn_major.step(k) for k in range(3)] == [0, 128, 256]  # 16 rows of 128 bytes


def test_instruction_descriptor_fields():
    tile = Tile(128, 128)
    pv = Umma(cutlass.BFloat16, n=96, k=128, b=SmemOperand(tile, Major.MN))
    fields = pv.instruction
    assert fields >> 4 & 3 == 1  # fp32 accumulator
    assert (fields >> 7 & 7, fields >> 10 & 7) == (1, 1)  # bfloat16 operands
    assert (fields >> 15 & 1, fields >> 16 & 1) == (0, 1)  # A K-major, B MN-major
    assert (fields >> 17 & 63, fields >> 24 & 31) == (96 // 8, 128 // 16)
    assert Umma(cutlass.Float16, n=64, k=40, b=SmemOperand(tile, Major.K)).steps == 3


ROOT = Path(__file__).parents[2]


def test_the_forwards_page_shows_its_tables():
    page = (ROOT / "docs" / "blackwell-forward.md").read_text()
    assert tables() in page, "run `python -m fa4.sm100.fwd` and paste it into docs/blackwell-forward.md"


def test_the_readme_shows_the_forwards_roles_and_picture():
    readme, parts = (ROOT / "README.md").read_text(), tables().split("\n\n")
    for part in (parts[0], next(part for part in parts if part.startswith("```mermaid"))):
        assert part in readme, "run `python -m fa4.sm100.fwd` and paste its roles and picture into README.md"
