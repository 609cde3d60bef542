"""NVIDIA's examples with their arguments: small, with partial tiles where the kernel allows them."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLES_ROOT = "examples/python/CuTeDSL"
COMMIT = "7107b05535f8977f5ecb9d01ee203205b1fd9bc4"  # of NVIDIA/cutlass, with which the table in the docs was made


@dataclass(frozen=True, slots=True)
class Example:
    """A script below EXAMPLES_ROOT of NVIDIA/cutlass and its command line.

    printed_error: for a script that asserts on differences of its own instead of calling torch's comparisons, the
    regular expression of the lines that print them.
    """

    name: str
    chip: str
    script: str
    arguments: tuple[str, ...]
    printed_error: str = ""

    def run(self, cutlass: Path) -> None:
        """Run the script of the checkout `cutlass` in this process, as from the shell."""
        script = cutlass / EXAMPLES_ROOT / self.script
        argv, path = sys.argv, list(sys.path)
        sys.argv = [str(script), *self.arguments]
        sys.path[:0] = [str(script.parent), str(cutlass / EXAMPLES_ROOT)]
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv, sys.path[:] = argv, path


_ONCE = "--warmup_iterations 0 --iterations 1"


def _example(name: str, chip: str, script: str, arguments: str, printed_error: str = "") -> Example:
    return Example(name, chip, script, tuple(arguments.split()), printed_error)


def _tutorials() -> list[Example]:
    folder = "cute/blackwell/tutorial/tutorial_gemm"
    shapes = {"0": "256,512,192", "1": "512,256,192"}
    names = ("0", "1", "2", "3", "3_1", "4", "5", "6")
    return [
        _example(f"fp16_gemm_{n}", "sm_100a", f"{folder}/fp16_gemm_{n}.py", f"--mnk {shapes.get(n, '512,512,256')}")
        for n in names
    ]


def _blackwell_gemms() -> list[Example]:
    folder = "cute/blackwell/kernel/dense_gemm"
    dense, persistent = f"{folder}/dense_gemm.py", f"{folder}/dense_gemm_persistent.py"
    one, two = "--cluster_shape_mn 1,1", "--use_2cta_instrs --cluster_shape_mn 2,1"
    f32 = "--c_dtype Float32 --acc_dtype Float32"
    variants = {
        "f16": f"--ab_dtype Float16 {f32} --mma_tiler_mn 128,128 {one} --mnkl 200,136,144,2 --use_tma_store",
        "f16 acc f16": f"--ab_dtype Float16 --c_dtype Float16 --acc_dtype Float16 --mma_tiler_mn 128,128 {one} "
        "--mnkl 136,200,72,1 --use_tma_store",
        "bf16 MN-major": "--ab_dtype BFloat16 --c_dtype BFloat16 --acc_dtype Float32 --a_major m --b_major n "
        f"--c_major m --mma_tiler_mn 64,128 {one} --mnkl 200,136,144,1 --use_tma_store",
        "tf32": f"--ab_dtype TFloat32 {f32} --mma_tiler_mn 128,128 {one} --mnkl 256,256,96,1",
        "e4m3": f"--ab_dtype Float8E4M3FN {f32} --mma_tiler_mn 128,128 {one} --mnkl 208,144,160,1 --use_tma_store",
        "e5m2": f"--ab_dtype Float8E5M2 {f32} --mma_tiler_mn 128,64 {one} --mnkl 144,208,160,1 --use_tma_store",
        "i8": f"--ab_dtype Int8 --c_dtype Int32 --acc_dtype Int32 --mma_tiler_mn 128,128 {one} --mnkl 208,144,160,1 "
        "--use_tma_store",
        "f16 2 CTA": f"--ab_dtype Float16 --c_dtype Float16 --acc_dtype Float32 --mma_tiler_mn 256,128 {two} "
        "--mnkl 520,136,144,2 --use_tma_store",
        "bf16 2 CTA M=128": f"--ab_dtype BFloat16 {f32} --mma_tiler_mn 128,128 {two} --mnkl 264,136,80,1 "
        "--use_tma_store",
    }
    examples = [
        _example(f"{script} {name}", "sm_100a", path, f"{arguments} {_ONCE}")
        for script, path in (("dense_gemm", dense), ("dense_gemm_persistent", persistent))
        for name, arguments in variants.items()
    ]
    return examples


_PROBLEMS = "--num_groups 3 --problem_sizes_mnkl (200,136,144,1),(64,264,80,1),(136,128,208,1)"


def _scaled_and_grouped() -> list[Example]:
    """Products of few bits with scale factors, and of several problems in one launch."""
    folder, tiles = "cute/blackwell/kernel", "--mma_tiler_mn 128,128 --cluster_shape_mn 1,1"
    return [
        _example("blockwise e4m3", "sm_100a", f"{folder}/blockwise_gemm/blockwise_gemm.py",
                 f"--mnkl 256,256,512,1 {tiles} {_ONCE}"),
        _example("blockwise e4m3 grouped", "sm_100a", f"{folder}/blockwise_gemm/contiguous_grouped_gemm.py",
                 f"--mnkl 256,256,512,2 {tiles} {_ONCE}"),
        _example("grouped_gemm", "sm_100a", f"{folder}/grouped_gemm/grouped_gemm.py", f"{_PROBLEMS} {tiles} {_ONCE}"),
    ]  # fmt: skip


def _blackwell_attention() -> list[Example]:
    folder = "cute/blackwell/kernel/attention/fmha"
    shapes = {
        "d128": "--q_shape 1,300,2,128 --k_shape 1,300,2,128",
        "d64 causal persistent GQA": "--q_shape 2,270,2,64 --k_shape 2,270,1,64 --is_causal --is_persistent",
        "d32 cross": "--q_shape 1,140,2,32 --k_shape 1,400,2,32",
        "d128 window": "--q_shape 1,300,1,128 --k_shape 1,300,1,128 --window_size 60,40",
    }
    forward = [
        _example(f"fmha {name}", "sm_100a", f"{folder}/fmha.py", f"{arguments} {_ONCE}")
        for name, arguments in shapes.items()
    ]
    shapes = {
        "d128": "--s_q 256 --s_k 256 --d 128 --h_q 2 --h_k 2 --b 1",
        "d64 causal GQA": "--s_q 200 --s_k 200 --d 64 --h_q 2 --h_k 1 --b 1 --is_causal",
    }
    backward = [
        _example(f"fmha_bwd {name}", "sm_100a", f"{folder}/fmha_bwd.py", f"{arguments} {_ONCE}",
                 printed_error=r"(?m)^d[qkv] max diff: (\S+)")
        for name, arguments in shapes.items()
    ]  # fmt: skip
    return forward + backward


def _hopper() -> list[Example]:
    gemm, folder = "cute/hopper/kernel/dense_gemm", "cute/hopper/kernel/attention"
    f16 = "--a_dtype Float16 --b_dtype Float16 --c_dtype Float16 --acc_dtype Float32"
    return [
        _example("hopper dense_gemm", "sm_90a", f"{gemm}/dense_gemm.py",
                 f"{f16} --mnkl 200,136,144,2 --tile_shape_mn 128,128 --cluster_shape_mn 1,1 {_ONCE}"),
        _example("hopper dense_gemm cluster", "sm_90a", f"{gemm}/dense_gemm.py",
                 f"{f16} --mnkl 264,136,144,1 --tile_shape_mn 128,128 --cluster_shape_mn 2,1 {_ONCE}"),
        _example("hopper dense_gemm_persistent", "sm_90a", f"{gemm}/dense_gemm_persistent.py",
                 f"{f16} --mnkl 328,264,144,1 --tile_shape_mn 128,128 --cluster_shape_mn 1,1 {_ONCE}"),
        _example("hopper fmha", "sm_90a", f"{folder}/fmha.py",
                 f"--q_shape 1,200,2,128 --k_shape 1,200,2,128 {_ONCE}"),
        _example("hopper fmha causal", "sm_90a", f"{folder}/fmha.py",
                 f"--q_shape 1,200,2,64 --k_shape 1,200,2,64 --is_causal {_ONCE}"),
        _example("hopper grouped_gemm", "sm_90a", "cute/hopper/kernel/grouped_gemm/grouped_gemm.py",
                 f"{_PROBLEMS} --tile_shape_mn 128,128 --cluster_shape_mn 1,1 --iterations 0"),
        _example("hopper e4m3", "sm_90a", f"{gemm}/dense_gemm_fp8_2xacc.py",
                 f"--mnkl 264,144,320,1 --tile_shape_mn 128,128 --cluster_shape_mn 1,1 {_ONCE}"),
    ]  # fmt: skip


def _ampere() -> list[Example]:
    folder = "cute/ampere/kernel"
    return [
        _example("ampere tensorop_gemm", "sm_80", f"{folder}/dense_gemm/tensorop_gemm.py",
                 f"--mnkl 200,136,72,1 {_ONCE}"),
        _example("ampere sgemm", "sm_80", f"{folder}/dense_gemm/sgemm.py", f"--mnk 140,132,36 {_ONCE}"),
        _example("ampere flash_attention_v2", "sm_80", f"{folder}/attention/flash_attention_v2.py",
                 f"--batch_size 1 --seqlen_q 140 --seqlen_k 140 --num_head 2 --head_dim 128 {_ONCE}"),
        _example("ampere flash_attention_v2 causal", "sm_80", f"{folder}/attention/flash_attention_v2.py",
                 f"--batch_size 1 --seqlen_q 140 --seqlen_k 140 --num_head 1 --head_dim 64 --is_causal {_ONCE}"),
    ]  # fmt: skip


EXAMPLES = (*_tutorials(), *_blackwell_gemms(), *_scaled_and_grouped(), *_blackwell_attention(), *_hopper(), *_ampere())
