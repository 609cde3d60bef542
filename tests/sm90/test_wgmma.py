"""Products of one warpgroup on panelled tiles: every operand form that kernels use, against float32."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

from fa4.emulator import emulate
from fa4.pipeline import fragment
from fa4.pipeline.smem import Tile
from fa4.pipeline.tma import TmaTile, tma_load
from fa4.sm90.wgmma import ROWS, Major, SmemOperand, Wgmma
from fa4.sm90.wgmma_order import wait


class Chain:
    """D = (A B^T) C, with A and B K-major in shared memory, the first product as a register operand, C MN-major."""

    def __init__(self, n: int, k: int, columns: int):
        self.tiles = Tile(ROWS, k), Tile(n, k), Tile(n, columns)
        a, b, c = self.tiles
        self.first = Wgmma(cutlass.BFloat16, n, k, SmemOperand(b, Major.K), SmemOperand(a, Major.K))
        self.second = Wgmma(cutlass.BFloat16, columns, n, SmemOperand(c, Major.MN))
        self.out = Tile(ROWS, columns)

    @cute.jit
    def host(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor):
        maps = [TmaTile.load(x, tile) for x, tile in zip((a, b, c), self.tiles)]
        atoms = [x for tma in maps for x in (tma.atom, tma.tensor)]
        nbytes = sum(tile.nbytes for tile in self.tiles) + 4 * Tile(16, self.second.n).nbytes + 1024
        self.kernel(*atoms, d).launch(grid=(1, 1, 1), block=(128, 1, 1), smem=nbytes)

    def places(self):
        """Where the operands lie, and where they end."""
        places, end = [], cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024) + 1024
        for tile in self.tiles:
            places.append(cute.recast_ptr(end, dtype=cutlass.BFloat16))
            end = end + tile.nbytes
        return places, end

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a: cute.Tensor,
        b_atom: cute.CopyAtom,
        b: cute.Tensor,
        c_atom: cute.CopyAtom,
        c: cute.Tensor,
        d: cute.Tensor,
    ):
        barrier = cute.recast_ptr(cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024), dtype=cutlass.Int64)
        places, end = self.places()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            load(self, (a_atom, b_atom, c_atom), (a, b, c), places, barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        chain(self, places, end + warp * Tile(16, self.second.n).nbytes, d, warp)


def load(self: Chain, atoms, tensors, places, barrier):
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, sum(tile.nbytes for tile in self.tiles))
    for atom, x, tile, place in zip(atoms, tensors, self.tiles, places):
        tma_load(TmaTile(atom, x, tile), x, 0, place, barrier)


def chain(self: Chain, places, staging, d, warp):
    s, o, p = self.first.accumulator(), self.second.accumulator(), self.second.a_registers()
    a, b, c = self.first.a_at(places[0]), self.first.b_at(places[1]), self.second.b_at(places[2])
    self.first.issue(s, a[None, None, None, 0], b[None, None, None, 0], False)
    wait(0)
    words = cute.recast_tensor(p, cutlass.Int32)
    for i, word in enumerate(fragment.pack_pairs(s, [cutlass.Float32(1.0)] * 2, cutlass.BFloat16)):
        words[i] = word
    self.second.issue(o, p, c[None, None, None, 0], False)
    wait(0)
    tile = Tile(16, self.second.n)
    fragment.store_matrices(staging.toint(), tile, fragment.pack_pairs(o, [cutlass.Float32(1.0)] * 2, cutlass.BFloat16))
    cute.arch.sync_warp()
    for r in range(fragment.ROWS_PER_THREAD):
        row = fragment.row_in_warp(r)
        for i, element in enumerate(fragment.row_registers(self.second.n, r)):
            d[warp * 16 + row, fragment.first_column() + 8 * (i // 2) + i % 2, 0] = o[element]
    swizzled = cute.recast_ptr(staging, cute.make_swizzle(3, 4, 3), dtype=cutlass.BFloat16)
    layout = cute.make_layout((16, (64, tile.panels)), stride=(64, (1, 16 * 64)))
    staged = cute.make_tensor(swizzled, layout)
    lane = cute.arch.lane_idx()
    for column in range(self.second.n):
        d[warp * 16 + lane % 16, column, 1] = staged[lane % 16, column].to(cutlass.Float32)


# (keys, head_dim, head_dim_v): whole panels, parts of one, several, an odd number of 8-column groups.
@pytest.mark.parametrize("n, k, columns", [(128, 128, 128), (80, 256, 256), (112, 192, 96), (64, 40, 72), (16, 8, 8)])
def test_chained_products(n, k, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(*x, generator=generator).bfloat16() for x in ((ROWS, k), (n, k), (n, columns)))
    d = torch.full((ROWS, columns, 2), torch.nan)
    with emulate("sm_90a", seed=seed):
        arguments = [from_dlpack(x, assumed_align=16) for x in (a, b, c, d)]
        cute.compile(Chain(n, k, columns).host, *arguments)(*arguments)
    expected = (a.float() @ b.float().T).bfloat16().float() @ c.float()
    step = 2.0**-8 * expected.abs().max()  # of bf16: the first product's sums may round the other way
    assert (d[..., 0] - expected).abs().max() <= step
    assert torch.equal(d[..., 1], d[..., 0].bfloat16().float())
