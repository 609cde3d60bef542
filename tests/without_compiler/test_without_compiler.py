"""A recorded model runs where CuTe DSL cannot be imported, and a missing kernel says what is there instead."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import first_call
from fa4.cli.main import main
from fa4.runtime import jit, linked, manifest
from fa4.runtime.toolchain import RUNTIME_LIBRARY

pytest.importorskip("cutlass", reason="compiling kernels needs CuTe DSL, which is installed on Linux only")

ROOT = Path(__file__).parents[2]
# Main kernel and padding rows; append, main kernel and combine; statistics, main kernel and finish of a backward.
LAUNCHES = {"training": 4, "packed": 2, "cache": 3, "latent": 2, "function": 4}


_BACKEND = """
import sys
sys.modules["cutlass"] = None
import torch
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number
from fa4.runtime.spec import AttentionSpec, ProblemSize
spec = AttentionSpec(torch.bfloat16, 64, 64, 1, 1, 0.1)
found = dispatch.explain(spec, ProblemSize(1, 8, 8), chip_by_number(90))
print(found.chosen, found, sep="\\n")
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels of the record of `calls`, with the stub in place of CuTe DSL's runtime library."""
    if linked.linker() is None or shutil.which("cc") is None:
        pytest.skip("needs a linker, and a C compiler for the stub")
    root = tmp_path_factory.mktemp("compiled")
    run("record", FA4_RECORD=str(root / "record.jsonl"))
    result = CliRunner().invoke(main, ["compile", "--from", str(root / "record.jsonl"), "--out", str(root / "kernels")])
    assert result.exit_code == 0, result.output
    (folder,) = (path for path in (root / "kernels").iterdir() if path.is_dir())
    assert (folder / RUNTIME_LIBRARY).stat().st_size > 1 << 20
    stub = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{RUNTIME_LIBRARY}", "-o", str(folder / RUNTIME_LIBRARY)]
    subprocess.run([*stub, str(Path(__file__).parent / "runtime_stub.c")], check=True)
    return folder


def run(mode: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", "tests.without_compiler.calls", mode], {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


@pytest.mark.rotates(2)
def test_a_recorded_model_launches_without_the_compiler(compiled):
    """Forward, backward, caches, latents and functions, by the process that compiles nothing. Nothing is written."""
    kernels = list(manifest.kernels(compiled))
    assert {kernel.target for kernel in kernels} == {"sm_90a"}
    assert {"sm90.forward", "sm90.backward", "sm90.latent", "append", "combine", "idle_rows"} <= {
        kernel.program for kernel in kernels
    }
    assert len(kernels) == len(list(compiled.glob("*.so"))) - 1 and not list(compiled.glob("*.o"))
    before = sorted(path.name for path in compiled.iterdir())
    launched = json.loads(run("launch", FA4_CACHE_DIR=str(compiled.parent)).stdout)
    assert launched == LAUNCHES
    assert sorted(path.name for path in compiled.iterdir()) == before


def test_kernels_are_listed(compiled, monkeypatch):
    monkeypatch.setenv("FA4_CACHE_DIR", str(compiled.parent))
    lines = CliRunner().invoke(main, ["cache", "--kernels"]).output.splitlines()
    (latent,) = (line for line in lines if line.startswith("sm_90a sm90.latent: "))
    assert "head_dim 576" in latent and "cache " in latent


@pytest.mark.rotates(2)
def test_only_the_process_that_compiles_imports_the_compiler():
    rows = first_call.rows_of("forward", 1, None)
    assert [(row["cache"], row["compiler"], row["imports_dsl"]) for row in rows] == [
        ("empty", "installed", True),
        ("filled", "installed", False),
        ("filled", "not importable", False),
    ]


@pytest.mark.rotates(2)
def test_a_missing_kernel_names_the_nearest(compiled, tmp_path):
    root = shutil.copytree(compiled.parent, tmp_path / "kernels")
    folder = root / compiled.name
    (gone,) = (x for x in manifest.kernels(folder) if x.program == "sm90.forward" and x.fields["varlen"] == "True")
    (folder / f"{gone.entry}.so").unlink()
    done = run("launch", check=False, FA4_CACHE_DIR=str(root))
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert "MissingKernel: this call needs a kernel of sm90.forward for sm_90a, and CuTe DSL" in message
    assert "the nearest has " in message and "varlen False instead of True" in message


@pytest.mark.rotates(2)
def test_a_directory_of_other_sources_is_not_used(compiled, tmp_path):
    root = shutil.copytree(compiled.parent, tmp_path / "kernels")
    facts = manifest.toolchain(root / compiled.name)
    (root / compiled.name / manifest.TOOLCHAIN).write_text(json.dumps(facts | {"sources": "0" * 16}))
    environment = {**os.environ, "FA4_CACHE_DIR": str(root)}
    done = subprocess.run([sys.executable, "-c", _BACKEND], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "torch" and "needs the module cutlass.cute" in done.stdout


def test_a_truncated_kernel_is_an_error_and_no_crash(compiled, tmp_path):
    entry = tmp_path / next(compiled.glob("*[0-9a-f].so")).name
    data = next(compiled.glob("*[0-9a-f].so")).read_bytes()
    for size in (0, 7, len(data) // 2, len(data) - 1):
        entry.write_bytes(data[:size])
        with pytest.raises(OSError, match="truncated"):
            linked.load(entry, jit._SYMBOL, compiled / RUNTIME_LIBRARY)


@pytest.mark.rotates(2)
def test_the_compiler_is_not_imported_for_what_is_on_disk(compiled):
    """Where CuTe DSL is installed, a process with a filled cache does not import it either."""
    launched = run("installed", FA4_CACHE_DIR=str(compiled.parent)).stdout
    assert json.loads(launched) == LAUNCHES
