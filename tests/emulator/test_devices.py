"""One story about devices for host code that asks: what a machine with a GPU would say, on a machine without."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from cutlass.cute.runtime import from_dlpack
from warpcheck.host.caches import FOLDERS, SWITCHES

import fa4
from fa4.emulator import emulate
from fa4.oracle import cases
from fa4.runtime.spec import Gradients

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def chip():
    with emulate("sm_100a", tells_devices_apart=True):
        yield


MADE = {
    "number": lambda: torch.zeros(3, device=0),
    "device": lambda: torch.zeros(3, device=torch.device("cuda", 0)),
    "to_number": lambda: torch.zeros(3).to(0),
    "to_name_and_dtype": lambda: torch.zeros(3).to("cuda:0", torch.float16),
    "cuda_method": lambda: torch.zeros(3).cuda(0),
    "like": lambda: torch.empty_like(torch.zeros(3).cuda()),
    "new": lambda: torch.zeros(3).cuda().new_zeros(2),
    "device_of_another": lambda: torch.zeros(2, device=torch.ones(1).cuda().device),
    "computed": lambda: torch.ones(3).cuda() + torch.ones(()),
    "view": lambda: torch.ones(4, 4).cuda().t()[1:],
    "module": lambda: torch.nn.Linear(2, 2).cuda().weight,
    "generator": lambda: torch.randn(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)),
    "dlpack": lambda: torch.utils.dlpack.from_dlpack(torch.ones(3).cuda()),
}
HOST = {
    "made": lambda: torch.zeros(3),
    "computed": lambda: torch.ones(3) + 1,
    "cpu_method": lambda: torch.zeros(3).cuda().cpu(),
    "to_name": lambda: torch.zeros(3).cuda().to("cpu"),
    "by_device": lambda: torch.zeros(3, device="cpu"),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_memory_of_the_gpu(chip, make) -> None:
    tensor = make()
    assert tensor.device == GPU and tensor.is_cuda and not tensor.is_cpu and tensor.get_device() == 0


@pytest.mark.parametrize("make", HOST.values(), ids=HOST)
def test_memory_of_the_host(chip, make) -> None:
    tensor = make()
    assert tensor.device == CPU and not tensor.is_cuda and tensor.get_device() == -1


def test_gradients_lie_where_their_tensors_do(chip) -> None:
    module, x = torch.nn.Linear(4, 4).cuda(), torch.randn(2, 4, device="cuda", requires_grad=True)
    seen = []
    x.register_hook(lambda grad: seen.append(grad.device))
    module(x).square().sum().backward()
    assert {x.grad.device, module.weight.grad.device, *seen} == {GPU}


class Doubled(torch.autograd.Function):
    """Its backward makes memory where the gradient lies, as backward kernels of packages do."""

    @staticmethod
    def forward(_context, x):
        return 2 * x

    @staticmethod
    def backward(_context, grad):
        result = torch.empty(grad.shape, device=grad.device)
        assert result.device == grad.device == GPU and result.isnan().all()
        return result.copy_(2 * grad.to(0))


def test_backward_passes_make_memory_on_the_gpu(chip) -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
    Doubled.apply(x).sum().backward()
    assert grad.tolist() == x.grad.tolist() == [2, 2, 2] and grad.device == x.grad.device == GPU


def test_a_default_device(chip) -> None:
    with torch.device("cuda"):
        assert torch.zeros(2).device == GPU and torch.zeros(2, device="cpu").device == CPU
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device == GPU and torch.zeros(2, device="cpu").device == CPU
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device == CPU


def test_dlpack_and_text_say_cuda(chip) -> None:
    tensor = torch.ones(3, device="cuda")
    assert tuple(tensor.__dlpack_device__()) == (2, 0) and "cuda:0" in repr(tensor)
    assert "gmem" in str(from_dlpack(tensor))


def test_streams_events_ranges_and_the_raw_calls(chip) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.device(GPU), torch.cuda.stream(stream), torch.cuda.nvtx.range("part"):
        torch.cuda.nvtx.range_push("inner")
        assert stream.record_event().query() and torch.cuda.nvtx.range_pop() == 0
    assert torch._C._cuda_getCurrentRawStream(0) == torch.cuda.current_stream(GPU).cuda_stream == 0
    assert torch._C._cuda_getDeviceCount() == 1
    assert torch.accelerator.current_accelerator().type == "cuda" and torch.version.cuda


def test_operators_for_cuda_only_and_compiled_functions(chip) -> None:
    @torch.library.custom_op("fa4_test::increment", mutates_args=(), device_types="cuda")
    def increment(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    library = torch.library.Library("fa4_test_raw", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: 2 * x, "CUDA")
    x = torch.ones(2, device="cuda")
    assert torch.compile(increment)(x).tolist() == [2, 2]
    assert torch.ops.fa4_test_raw.double(x).tolist() == [2, 2]


def test_operators_make_memory_on_the_gpu(chip) -> None:
    """torch takes function modes away while an operator's kernel runs."""

    @torch.library.custom_op("fa4_test::filled", mutates_args=(), device_types="cuda")
    def filled(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty(x.shape, device=x.device)
        assert result.device == x.device == GPU and x.to(0).data_ptr() == x.data_ptr()
        return result.fill_(3)

    library = torch.library.Library("fa4_test_filled", "FRAGMENT")
    library.define("raw(Tensor x) -> Tensor")
    library.impl("raw", lambda x: torch.zeros(x.shape, device=x.device) + 5, "CUDA")
    x = torch.ones(2, device="cuda")
    assert filled(x).tolist() == [3, 3] and torch.ops.fa4_test.filled(x).device == GPU
    assert torch.ops.fa4_test_filled.raw(x).tolist() == [5, 5]


def test_a_copy_is_made_only_between_two_memories(chip) -> None:
    on_gpu, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    assert all(on_gpu.data_ptr() == same.data_ptr() for same in (on_gpu.cuda(), on_gpu.to("cuda"), on_gpu.to(0)))
    assert all(on_host.data_ptr() == same.data_ptr() for same in (on_host.cpu(), on_host.to("cpu")))
    assert on_gpu.to("cpu").device == CPU and on_gpu.device == GPU
    assert on_host.to(on_gpu).device == GPU and on_gpu.to(on_host).device == CPU
    crossed = on_gpu.cpu(), on_gpu.to("cpu"), on_host.cuda(), on_host.to(0), on_gpu.to("cuda", copy=True)
    assert not {on_gpu.data_ptr(), on_host.data_ptr()} & {other.data_ptr() for other in crossed}


def test_pinned_memory_is_the_hosts(chip) -> None:
    pinned = torch.empty(4, pin_memory=True), torch.ones(4).pin_memory()
    for tensor in pinned:
        assert tensor.device == CPU and tensor.to("cuda", non_blocking=True).device == GPU
    torch.ones(1, device="cuda").record_stream(torch.cuda.current_stream())


def test_extensions_see_the_device_through_dlpack(chip) -> None:
    """tvm-ffi reads torch's tensors by the C exchange, as other extensions do."""
    import tvm_ffi

    on_gpu, on_host = torch.arange(3.0, device="cuda"), torch.arange(3.0)
    seen, there = tvm_ffi.from_dlpack(on_gpu), tvm_ffi.from_dlpack(on_host)
    assert str(seen.device) == "cuda:0" and str(there.device) == "cpu:0"
    back = torch.from_dlpack(seen)
    assert back.device == GPU and back.data_ptr() == on_gpu.data_ptr()
    assert tvm_ffi.convert(lambda x: x)(on_gpu).data_ptr() == on_gpu.data_ptr()


def test_packages_keep_no_emulated_kernels(monkeypatch, tmp_path) -> None:
    """Neither where they are told to keep none, nor in the usual places; weights and data stay where they are."""
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "1")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "weights").write_text("weights")
    before = {name: os.environ.get(name) for name in (*SWITCHES, *FOLDERS)}
    with emulate("sm_90a", tells_devices_apart=True):
        assert {os.environ[name] for name in SWITCHES} == {"0"}
        kept = [Path(tempfile.gettempdir(), "kernel.o"), *(Path(os.environ[name], "kernel.o") for name in FOLDERS)]
        for path in kept:
            path.write_text("emulated")
        assert Path(os.environ["XDG_CACHE_HOME"], "huggingface", "weights").read_text() == "weights"
    assert before == {name: os.environ.get(name) for name in (*SWITCHES, *FOLDERS)}
    assert not (tmp_path / "kernel.o").exists() and not Path(tempfile.gettempdir(), "kernel.o").exists()
    assert (tmp_path / "huggingface" / "weights").exists()


REMEMBERING = """
import json, os, sys, tempfile
from pathlib import Path
from fa4.runtime import jit
from fa4.emulator import emulate
from warpcheck.host.caches import FOLDERS

with emulate("sm_90a", tells_devices_apart=True):
    own = jit.cache_directory()  # cached for the life of the process
    places = [tempfile.gettempdir(), *(os.environ[name] for name in FOLDERS)]  # as modules imported here do
    if not os.fork():
        sys.exit()
    os.wait()
    assert all(Path(place).is_dir() for place in places), "a child took the directory away"
with emulate("sm_90a", tells_devices_apart=True):
    assert tempfile.gettempdir() not in places, "one order of kernels found those of another"
for place in places:
    Path(place, "kernel.o").write_text("emulated")
(own / "kernel.o").write_text("emulated")
print(json.dumps([places, str(own)]))
"""


def test_places_of_kernels_last_as_long_as_whoever_remembers_them(tmp_path) -> None:
    """A process goes on to compile after `emulate`; no later process finds what it kept, but fa4's own kernels."""
    root = Path(__file__).parents[2]
    sources = os.pathsep.join([str(root), str(root / "warpcheck" / "src")])
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": sources}
    environment.pop("FA4_CACHE_DIR", None)
    command = [sys.executable, "-c", REMEMBERING]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    places, own = json.loads(done.stdout)
    assert not any(Path(place).exists() for place in places)
    assert Path(own, "kernel.o").exists() and Path(own).is_relative_to(tmp_path / "fa4")


def test_nothing_of_it_stays() -> None:
    before = torch.Tensor.device, torch.compile, torch.version.cuda
    with emulate("sm_90a", tells_devices_apart=True):
        tensor = torch.ones(1, device="cuda")
    assert tensor.device == CPU and not tensor.is_cuda and not hasattr(torch._C, "_cuda_getCurrentRawStream")
    assert before == (torch.Tensor.device, torch.compile, torch.version.cuda)
    with emulate("sm_90a"):
        assert torch.ones(1).is_cuda and torch.ones(1).device == CPU


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_fa4_itself_is_called_with_tensors_of_a_gpu(target, seed):
    """A GPU test of somebody who calls fa4: what fa4 allocates lies on that GPU too."""
    case = cases.Case("on_a_gpu", seqlen_q=70, seqlen_k=70, causal=True)
    problem = cases.make(case, seed)
    with emulate(target, tells_devices_apart=True):
        leaves = [x.clone().to("cuda").requires_grad_() for x in problem.inputs[:3]]
        out, lse = fa4.flash_attn_func(*leaves, causal=True, return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, (problem.dout.to("cuda"), problem.dlse.to("cuda")))
        results = (out, lse, *grads)
        assert all(x.is_cuda and x.device.type == "cuda" for x in results)
        out, lse, *grads = (x.detach().cpu() for x in results)
    judged = cases.judge_forward(problem, out, lse) + cases.judge_backward(problem, Gradients(*grads))
    cases.assert_right(judged, f"seed {seed}")
