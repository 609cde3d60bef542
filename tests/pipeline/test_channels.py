"""The tables a warp-specialised kernel is built from: what they derive, and what they refuse."""

import contextlib

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.pipeline import ends
from fa4.pipeline.channels import By, Carries, Channel, ChannelTable, ClusterSharing, Every, Implied
from fa4.pipeline.ends import Ends
from fa4.pipeline.roles import Role, RoleTable
from fa4.pipeline.smem import Region, SmemMap, Tile

ROLES = RoleTable((Role("softmax", (0, 8), 192, instances=2), Role("mma", (8, 9), 64), Role("load", (9, 10), 64)))
HOPPER = RoleTable((Role("load", (0, 4), 24), Role("consume", (4, 12), 240, instances=2)))


def channel(name="mma_softmax_S", producer="mma", consumer="softmax", filled=By.UMMA, freed=By.WARP, stages=2, **more):
    return Channel(name, producer, consumer, filled, freed, stages, Carries.TMEM, **more)


def test_arrivals_follow_from_roles():
    table = ChannelTable(
        (channel(consumer=("softmax", "load")), channel("load_mma_K", "load", "mma", By.TMA, By.UMMA, 3)), ROLES
    )
    s, k = table.channels
    assert table.full_arrivals(s) == 1
    assert table.free_arrivals(s) == 4 + 1  # one softmax team and the load warp
    assert table.full_arrivals(k) == table.free_arrivals(k) == 1
    assert table.nbytes == 8 * (2 * 2 + 2 * 3)
    assert table.barrier_names()[:4] == tuple(f"mma_softmax_S.{side}[{i}]" for side in ("full", "free") for i in (0, 1))
    assert table.offset(k) == 4


@pytest.mark.parametrize("ctas, arrivals", [(1, 8), (2, 16)])
def test_every_instance_releases_a_stage(ctas, arrivals):
    """Two warpgroups read each block of keys; when copies are multicast, so do those of the other CTAs."""
    sharing = ClusterSharing.MULTICAST if ctas > 1 else ClusterSharing.NOTHING
    keys = Channel("load_consume_K", "load", Every("consume"), By.TMA, By.WGMMA, 2, Carries.ASYNC_SMEM, ctas, sharing)
    table = ChannelTable((keys,), HOPPER)
    assert table.free_arrivals(keys) == arrivals
    assert table.full_arrivals(keys) == 1  # its own announcement; the bytes come on top


def test_a_pair_counts_on_its_leader():
    table = ChannelTable((channel(filled=By.WARP, ctas=2, sharing=ClusterSharing.PAIR),), ROLES)
    (s,) = table.channels
    assert (table.full_arrivals(s), table.free_arrivals(s)) == (2, 8)


@pytest.mark.parametrize(
    "rows, complaint",
    [
        ((channel(), channel()), "share a name"),
        ((channel(consumer="reader"),), "no role is named 'reader'"),
        ((channel(stages=0),), "has 0 stages"),
        ((channel(ctas=2),), "2 CTAs and does not say"),
        ((channel(freed=Implied("softmax_mma_P")),), "no channel is named 'softmax_mma_P'"),
        ((channel(), channel("mma_load_Q", "mma", "load", freed=Implied("mma_softmax_S"))), "producer mma does not"),
        ((channel(), channel("x", "softmax", "mma", By.WARP, Implied("mma_softmax_S", "free"))), "softmax does not"),
        ((channel(), channel("x", "softmax", "mma", By.WARP, Implied("mma_softmax_S", "empty"))), "one of full, free"),
    ],
)
def test_channel_table_refuses(rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        ChannelTable(rows, ROLES)


def test_an_implied_release_has_no_barrier():
    p = channel("softmax_mma_P", "softmax", "mma", By.WARP, Implied("mma_softmax_S"))
    table = ChannelTable((channel(freed=Implied("softmax_mma_P")), p), ROLES)
    assert table.nbytes == 8 * (2 + 2)
    with pytest.raises(ValueError, match="used as free barriers"):
        Ends(table, "softmax", 0).softmax_mma_P.free(0)


@pytest.mark.parametrize(
    "role, operation", [("softmax", "commit_full"), ("mma", "arrive_full"), ("softmax", "wait_free")]
)
def test_an_end_refuses_what_its_role_does_not_do(role, operation):
    end = Ends(ChannelTable((channel(),), ROLES), role, 0).mma_softmax_S
    arguments = (0, 0) if operation.startswith("wait") else (0,)
    with pytest.raises(ValueError, match=f"mma_softmax_S: {role} is used as a"):
        getattr(end, operation)(*arguments)


def test_only_a_release_of_a_multicast_goes_to_every_cta(monkeypatch):
    """The role fills the stages and releases them: its arrivals on full barriers stay in its own CTA."""
    shared = (2, ClusterSharing.MULTICAST)
    x = Channel("x", "consume", "load", By.WARP, By.WARP, 1, Carries.SMEM, *shared, releaser="consume")
    end, arrivals = Ends(ChannelTable((x,), HOPPER), "consume", 0).x, []
    monkeypatch.setattr(ends.cute.arch, "elect_one", contextlib.nullcontext)
    monkeypatch.setattr(ends.cute.arch, "sync_warp", lambda: None)
    monkeypatch.setattr(ends.cute.arch, "mbarrier_arrive", lambda *barrier, **_scope: arrivals.append(barrier))
    end.arrive_full(0)
    assert arrivals == [(end.full(0),)]
    end.arrive_free(0)
    assert arrivals[1:] == [(end.free(0), 0), (end.free(0), 1)]


def test_a_chip_without_tcgen05_refuses_its_channels():
    ends = Ends(ChannelTable((channel(),), ROLES), "mma", 0)
    with pytest.raises(ValueError, match="knows no matrix operations that signal barriers"):
        ends.mma_softmax_S.commit_full(0)


def test_a_role_sees_only_its_channels():
    ends = Ends(ChannelTable((channel(),), ROLES), "load", 0)
    assert not hasattr(ends, "mma_softmax_S")


@pytest.mark.parametrize(
    "roles, complaint",
    [
        ((Role("a", (0, 4), 128), Role("b", (5, 8), 128)), "expected them to start at 4"),
        ((Role("a", (0, 4), 100),), "multiple of 8"),
        ((Role("a", (0, 3), 64), Role("b", (3, 4), 72)), "must agree on regs"),
        ((Role("a", (0, 16), 136),), "the SM has 65536"),
        ((Role("a", (0, 4), 128, instances=3),), "unequal instances"),
    ],
)
def test_role_table_refuses(roles, complaint):
    with pytest.raises(ValueError, match=complaint):
        RoleTable(roles)


def test_idle_warps_complete_the_last_warpgroup():
    assert (ROLES.warpgroups, ROLES.threads) == (3, 384)


def test_smem_map_aligns_and_overlays():
    smem = SmemMap(Region("a", 100), Region("b", 4096, align=1024), Region("c", 10, over="b"), Region("d", 8, align=8))
    assert smem.offsets == {"a": 0, "b": 1024, "c": 1024, "d": 5120}
    assert smem.nbytes == 5128
    with pytest.raises(ValueError, match="does not fit over"):
        SmemMap(Region("a", 100), Region("b", 101, over="a"))
    with pytest.raises(ValueError, match="two smem regions are named a"):
        SmemMap(Region("a", 100), Region("b", 10), Region("a", 100))


@pytest.mark.parametrize("bits, panel_columns, panels", [(16, 64, 2), (8, 128, 1)])
def test_a_panel_is_128_bytes_wide(bits, panel_columns, panels):
    tile = Tile(128, 96, bits)
    assert (tile.panel_columns, tile.panels, tile.panel_bytes) == (panel_columns, panels, 16384)
    assert tile.nbytes == panels * 16384
