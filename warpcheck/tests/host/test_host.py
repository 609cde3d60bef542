"""The host side: unmodified CuTe DSL host code, torch.cuda and the driver's answers, on CPU tensors."""
# ruff: noqa: E402  (what follows importorskip needs CuTe DSL)

import ctypes

import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

import cutlass.cute as cute
from cuda.bindings import driver, runtime
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream
from torch.nn.attention import flex_attention
from warpcheck.context import Gpu
from warpcheck.errors import EmulationError, OutOfBounds
from warpcheck.host.buffers import CUDA_ALIGNMENT
from warpcheck.host.memory import freeze, torch_allocations
from warpcheck.host.modules import Modules, parameter_bytes
from warpcheck.trace import write

from warpcheck import emulate


@cute.kernel
def add_kernel(x: cute.Tensor, amount: cutlass.Float32):
    index = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    if index < cute.size(x):
        x[index] = x[index] + amount


@cute.jit
def add(x: cute.Tensor, amount: cutlass.Float32):
    add_kernel(x, amount).launch(grid=(cute.ceil_div(cute.size(x), 32), 1, 1), block=(32, 1, 1))


@cute.jit
def add_twice(x: cute.Tensor, stream):
    blocks = cute.ceil_div(cute.size(x), 32)
    add_kernel(x, 1.0).launch(grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream)
    add_kernel(x, 10.0).launch(grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream, cluster=(1, 1, 1))


@cute.kernel
def far_kernel(x: cute.Tensor):
    x[cute.arch.thread_idx()[0] + 1000] = 0.0


@cute.jit
def far(x: cute.Tensor):
    far_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_jit_function_called_directly() -> None:
    x = torch.arange(70.0)
    with emulate("sm_100a") as gpu:
        add(from_dlpack(x), 2.0)
    assert torch.equal(x, torch.arange(70.0) + 2)
    assert gpu.launches[0].grid == (3, 1, 1)
    assert gpu.report().warp_instructions > 0


def test_tvm_ffi_function_and_its_errors() -> None:
    with emulate("sm_90a"):
        fake = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        compiled = cute.compile(add_twice, fake, stream, options="--enable-tvm-ffi")
        x = torch.zeros(45)
        compiled(x)
        assert torch.equal(x, torch.full((45,), 11.0))
        y = torch.zeros(8)
        broken = cute.compile(far, fake, options="--enable-tvm-ffi")
        with pytest.raises(OutOfBounds, match=r"test_host\.py"):
            broken(y)


def test_driver_stream_and_numpy() -> None:
    x = np.zeros(33, np.float32)
    with emulate("sm_80"):
        compiled = cute.compile(add_twice, from_dlpack(x), driver.CUstream(0))
        compiled(from_dlpack(x), driver.CUstream(torch.cuda.current_stream().cuda_stream))
    assert (x == 11).all()


def test_error_keeps_its_type_and_the_next_launch_works() -> None:
    x = torch.zeros(8)
    with emulate("sm_100a"):
        with pytest.raises(OutOfBounds, match=r"tensor 8 torch.float32"):
            far(from_dlpack(x))
        add(from_dlpack(x), 1.0)
    assert torch.equal(x, torch.ones(8))


def test_compiled_function_outlives_its_context_but_not_its_chip() -> None:
    x = torch.zeros(32)
    with emulate("sm_100a"):
        compiled = cute.compile(add, from_dlpack(x), cutlass.Float32(0))
    with emulate("sm_100a", seed=5):
        compiled(from_dlpack(x), 3.0)
    assert torch.equal(x, torch.full((32,), 3.0))
    with emulate("sm_90a"), pytest.raises(EmulationError, match="sm_100a cannot run on the emulated sm_90a"):
        compiled(from_dlpack(x), 3.0)


def test_same_seed_same_trace(seed: int) -> None:
    def hashes(chosen: int) -> list[int]:
        with emulate("sm_100a", seed=chosen, schedule="random") as gpu:
            add(from_dlpack(torch.zeros(500)), 1.0)
        return [launch.trace_hash for launch in gpu.launches]

    assert hashes(seed) == hashes(seed)
    assert hashes(seed) != hashes(seed + 1)


def test_trace_file(tmp_path) -> None:
    import json

    with emulate("sm_100a", trace=True) as gpu:
        gpu.roles = lambda entry: {0: f"adder of {entry.count('add_kernel')}"}
        add(from_dlpack(torch.zeros(64)), 1.0)
    assert write(tmp_path / "trace.json", gpu.launches) > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert "warp 0 (adder of 1)" in {event["args"].get("name") for event in events}


def test_torch_cuda_is_the_emulated_chip() -> None:
    with emulate("sm_103a", sms=7):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (10, 3)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 7
        host = torch.randn(5, 3)
        x = host.cuda()
        assert x.is_cuda and x.data_ptr() != host.data_ptr() and x.data_ptr() % CUDA_ALIGNMENT == 0
        assert torch.empty(3, device="cuda").data_ptr() % CUDA_ALIGNMENT == 0
        assert x.to("cuda:0", torch.float16).dtype is torch.float16
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), end.record()
        assert start.elapsed_time(end) > 0
    assert not host.is_cuda and not torch.cuda.is_available()


def test_memory_made_inside_of_a_transform() -> None:
    """It is aligned as other memory is, and nobody there may ask for gradients. torch makes block masks so."""
    with emulate("sm_80"):
        halves = torch.arange(40) // 20
        mask = flex_attention.create_block_mask(
            lambda b, h, q_idx, kv_idx: halves[q_idx] == halves[kv_idx], None, None, 40, 40, device="cpu", BLOCK_SIZE=20
        )
        sums = torch.vmap(lambda row: torch.ones(3).cumsum(0) * row.sum())(torch.ones(4, 33, requires_grad=True))
    assert mask.to_dense().squeeze().equal(torch.eye(2, dtype=torch.int32)) and sums.requires_grad


def test_fresh_memory_is_poison() -> None:
    """A row that no kernel writes must not look right because the heap was clean."""
    like = torch.zeros(2, 3, dtype=torch.bfloat16)
    with emulate("sm_100a"):
        fresh = [
            torch.empty(7),
            torch.empty(7, device="cuda", dtype=torch.float16),
            torch.empty_like(like),
            torch.empty_strided((2, 3), (3, 1)),
            like.new_empty(5),
            like.new_empty_strided((2,), (1,)),
        ]
        _, address = driver.cuMemAlloc(1000)
        assert set(ctypes.string_at(int(address), 1000)) == {0xFF}
        assert torch.empty(4, dtype=torch.int32).tolist() == [-1] * 4
        assert not torch.zeros(4).any() and torch.ones(3).all()
    assert all(tensor.isnan().all() for tensor in fresh)


def test_graph_replays_what_was_captured() -> None:
    x = torch.zeros(32)
    with emulate("sm_90a"):
        compiled = cute.compile(add_twice, from_dlpack(x), driver.CUstream(0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compiled(from_dlpack(x), driver.CUstream(0))
        assert x.sum() == 0
        graph.replay()
        graph.replay()
    assert torch.equal(x, torch.full((32,), 22.0))


def test_driver_answers() -> None:
    with emulate("sm_100a", sms=6):
        assert runtime.cudaGetDeviceCount() == (runtime.cudaError_t.cudaSuccess, 1)
        hardware = cutlass.utils.HardwareInfo()
        assert hardware.get_max_active_clusters(2) == 3
        assert hardware.get_device_multiprocessor_count() == 6
        kernel = driver.CUfunction(0)
        _, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, 384, 100 * 1024)
        assert blocks == 2, "228 KiB hold two of 101"
        assert driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, 1000, 0)[1] == 2, (
            "whole warps of 2048 threads"
        )
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
        config.sharedMemBytes, config.numAttrs = 100 * 1024, 0
        assert driver.cuOccupancyMaxActiveClusters(kernel, config)[1] == 12
        _, address = driver.cuMemAlloc(1000)
        driver.cuMemsetD32Async(address, 7, 250, driver.CUstream(0))
        copy = np.zeros(250, np.uint32)
        driver.cuMemcpyDtoH(copy.ctypes.data, address, 1000)
        assert (copy == 7).all()
        driver.cuMemFree(address)


def test_unknown_chip_and_bad_arguments() -> None:
    with pytest.raises(ValueError, match="chip is 'sm_42', expected one of sm_80"), emulate("sm_42"):
        pass
    with pytest.raises(ValueError, match="sms is 0"), emulate("sm_80", sms=0):
        pass


def test_kernel_compiled_elsewhere_is_refused() -> None:
    """Code that the emulator did not see compile has no PTX to run."""
    with pytest.raises(EmulationError, match="compile it inside"):
        Modules().load(b"some other binary")


def test_a_nested_tensor_has_memory_and_no_shape():
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])
    found = [a for a in torch_allocations() if a.base == nested.untyped_storage().data_ptr()]
    assert [a.nbytes for a in found] == [32] and "nested" in found[0].name


def test_allocations_are_exact() -> None:
    base = torch.zeros(100, dtype=torch.int32)
    view = base[10:20].view(torch.float32)
    found = [a for a in torch_allocations() if a.base == base.data_ptr()]
    assert [a.nbytes for a in found] == [400]
    del view


def test_parameter_bytes() -> None:
    ptx = (
        ".visible .entry f(.param .u64 a, .param .align 64 .b8 b[128],\n .param .u32 .ptr .global .align 4 c,\n"
        " .param .f32 d, .param .b8 e) .reqntid 32 { ret; }"
    )
    assert parameter_bytes(ptx, "f") == (8, 128, 4, 4, 1)
    with pytest.raises(EmulationError, match="no entry g, only f"):
        parameter_bytes(ptx, "g")


def test_gpu_report_names_roles() -> None:
    with emulate("sm_100a") as gpu:
        assert isinstance(gpu, Gpu)
        gpu.roles = {0: "adder"}
        add(from_dlpack(torch.zeros(32)), 1.0)
    assert "adder:" in str(gpu.report())


def test_frozen_tensors_stay_known() -> None:
    before = torch.ones(5)
    freeze()
    after = torch.ones(7)
    known = {allocation.base for allocation in torch_allocations()}
    assert {before.data_ptr(), after.data_ptr()} <= known
    place = before.data_ptr()
    del before
    assert place not in {allocation.base for allocation in torch_allocations()}
