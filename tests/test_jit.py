"""The compile cache: one build per key, entries that survive a process, refusals that name the culprit."""

import ast
import errno
import fcntl
import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from warpcheck.errors import EmulationError

import fa4
from fa4.emulator import emulate
from fa4.runtime import disk, jit, toolchain
from fa4.runtime.device import chip_by_number, chip_of

pytest.importorskip("cutlass", reason="compiling kernels needs CuTe DSL, which is installed on Linux only")

from tests.compiled_for import scale_kernel

_CHIP = chip_by_number(80)

# A process that compiles a kernel for a real chip and one for an emulated chip, and prints what it had to build.
_PROCESS = """
import torch
from fa4.runtime import disk, jit, toolchain
from fa4.runtime.device import chip_by_number, chip_of
from fa4.emulator import emulate
from tests.compiled_for import scale_kernel

built = []
def compiled(chip):
    def build():
        built.append("emulated" if chip.emulated else "real")
        return scale_kernel(chip)
    return jit.compiled(("scale",), build, chip)
chip = chip_by_number(80)
assert compiled(chip) is compiled(chip)
x = torch.ones(20, 1)
with emulate("sm_80") as gpu:
    compiled(chip_of(x.device))(x, 3.0)
assert (x == 3).all() and len(gpu.launches) == 1
print(*built)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    env = {**os.environ, "FA4_CACHE_DIR": str(tmp_path / "cache"), "FA4_CACHE": "1"}
    command, root = [sys.executable, "-c", _PROCESS], Path(__file__).parents[1]
    for expected in ("real emulated", ""):
        done = subprocess.run(command, env=env, cwd=root, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == expected


# Ranks of a job that starts, forked so that they share what is imported: each writes down what it compiled.
_RANKS = """
import os, sys
from fa4.runtime import jit
from fa4.runtime.device import chip_by_number
from tests.compiled_for import scale_kernel

def build():
    os.write(built, b"%d " % os.getpid())
    return scale_kernel(chip_by_number(80))

jit.fingerprint()
built = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
come, go = os.pipe()
ranks = []
for _ in range(8):
    rank = os.fork()
    if rank == 0:
        os.close(go)
        os.read(come, 1)  # until all are there
        launcher = jit.compiled(("scale",), build, chip_by_number(80))
        os._exit(not callable(launcher))
    ranks.append(rank)
os.close(go)
sys.exit(any(os.waitpid(rank, 0)[1] for rank in ranks))
"""


def test_of_eight_ranks_that_start_together_one_compiles(tmp_path):
    env = {**os.environ, "FA4_CACHE_DIR": str(tmp_path / "cache"), "FA4_CACHE": "1"}
    command, root = [sys.executable, "-c", _RANKS, str(tmp_path / "built")], Path(__file__).parents[1]
    subprocess.run(command, env=env, cwd=root, check=True)
    assert len((tmp_path / "built").read_text().split()) == 1


def test_a_broken_entry_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(jit, "_launchers", {})
    built = []

    def build():
        built.append(1)
        return scale_kernel(_CHIP)

    def builds_so_far() -> int:
        jit._launchers.clear()
        jit.compiled(("scale",), build, _CHIP)
        return len(built)

    assert [builds_so_far(), builds_so_far()] == [1, 1]
    (entry,) = (path for path in tmp_path.iterdir() if path.suffix in (".o", ".so"))
    good = entry.read_bytes()
    entry.unlink()  # this process has mapped it
    entry.write_bytes(good[: len(good) // 2])
    assert [builds_so_far(), builds_so_far()] == [2, 2]


def test_one_build_per_key(monkeypatch):
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: None)
    built = []

    def build():
        built.append(1)
        return lambda: None

    first = jit.compiled(("k", 1, (torch.float16, None)), build, _CHIP)
    assert jit.compiled(("k", 1, (torch.float16, None)), build, _CHIP) is first
    assert len(built) == 1
    jit.compiled(("k", 2, (torch.float16, None)), build, _CHIP)
    jit.compiled(("k", 2, (torch.float16, None)), build, chip_by_number(90))
    assert len(built) == 3


def test_a_tensor_in_a_key_is_refused():
    with pytest.raises(TypeError, match=r"compile key holds Tensor"):
        jit.compiled(("k", (torch.tensor(3),)), lambda: None, _CHIP)
    with jit.compile_only() as dry, pytest.raises(TypeError, match=r"compile key holds Tensor"):
        jit.compiled((torch.tensor(3),), lambda: None, replace(_CHIP, dry_run=dry))


@pytest.fixture
def anew(monkeypatch):
    """`cache_directory` as a fresh process finds it; the fingerprint is "print"."""
    monkeypatch.setattr(jit, "fingerprint", lambda: "print")
    for name in ("FA4_CACHE", "FA4_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return jit.cache_directory.__wrapped__


@pytest.mark.parametrize(
    "variable, below",
    [("FA4_CACHE_DIR", "print"), ("XDG_CACHE_HOME", "fa4/print"), ("HOME", ".cache/fa4/print")],
)
def test_where_kernels_are_kept(monkeypatch, tmp_path, anew, variable, below):
    home = tmp_path / "not there yet"
    monkeypatch.setenv(variable, str(home))
    for _ in range(2):  # made, and found again
        found = anew()
        assert found == home / below and found.is_dir()
    assert [stat.S_IMODE(x.stat().st_mode) for x in (found, found.parent)] == [0o700, 0o700]


def test_no_kernels_are_kept_if_the_cache_is_off(monkeypatch, tmp_path, anew):
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "off"))
    monkeypatch.setenv("FA4_CACHE", "0")
    assert anew() is None and not (tmp_path / "off").exists()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702], ids=oct)
def test_a_directory_others_may_write_is_not_used(monkeypatch, tmp_path, anew, mode):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    monkeypatch.setenv("FA4_CACHE_DIR", str(shared))
    with pytest.warns(UserWarning, match="not yours alone"):
        assert anew() is None


def test_a_directory_of_somebody_else_is_not_used(monkeypatch, tmp_path, anew):
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="not yours alone"):
        assert anew() is None


@pytest.mark.parametrize("emulated", [False, True])
def test_what_the_compiler_is_told(monkeypatch, emulated):
    """An emulated chip runs PTX, so it is kept; nobody else pays for it."""
    from cutlass import cute

    monkeypatch.setattr(cute, "compile", lambda *arguments, options, **control: (arguments, options.split(), control))
    arguments, options, control = jit.compile_kernel(print, 1, 2, chip=chip_by_number(90, emulated=emulated))
    more = ["--keep-ptx", "--generate-line-info"] if emulated else []
    assert arguments == (print, 1, 2) and options == ["--enable-tvm-ffi", "--gpu-arch", "sm_90a", *more]
    assert control == dict(no_jit_engine=False)


def test_host_code_is_made_for_the_object_file_alone(monkeypatch, tmp_path, loaded):
    """What goes to the disk is not made callable in this process as well; what could not be kept is."""
    from cutlass import cute

    asked = []

    def compile_one(*arguments, no_jit_engine, **named):
        asked.append(no_jit_engine)
        return Kernel(OSError("full") if len(asked) == 2 else None)

    monkeypatch.setattr(cute, "compile", compile_one)

    def build():
        return jit.compile_kernel(print, chip=chip_by_number(90))

    jit._through_disk(tmp_path, ("sm_80", False, ("kept",)), build)
    assert asked == [True]
    with pytest.warns(UserWarning, match="full"):
        jit._through_disk(tmp_path, ("sm_80", False, ("not kept",)), build)
    assert asked == [True, True, False]
    jit.DryRun(tmp_path).compile(jit.Request(("dry",), build, chip_by_number(90)))
    assert asked == [True, True, False, True]
    build()
    assert asked == [True, True, False, True, False]


def test_what_stands_for_a_tensor_at_compile_time(monkeypatch):
    """Rank, strides and alignment are all that code may rely on."""
    from cutlass.cute import runtime

    monkeypatch.setattr(runtime, "make_fake_tensor", lambda *x, **named: (*x, named))
    monkeypatch.setattr(runtime, "make_fake_compact_tensor", lambda *x, **named: (*x, named))
    for align in (16, 4):
        given = {} if align == 16 else dict(align=align)
        dtype, shape, stride, named = jit.fake_tensor("dtype", 3, **given)
        assert (dtype, len(shape), len(stride), stride[-1]) == ("dtype", 3, 3, 1) and named == dict(assumed_align=align)
        assert len({id(x) for x in (*shape, *stride)}) == 6
        dtype, shape, named = jit.fake_tensor("dtype", 3, contiguous=True, **given)
        assert (dtype, len(shape)) == ("dtype", 3)
        assert named == dict(stride_order=(2, 1, 0), assumed_align=align)


class Kernel:
    """Stands for what the compiler returns; exports some bytes, or fails as a full disk does."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error

    def export_to_c(self, path: str, symbol: str) -> None:
        Path(path).write_bytes(b"half")
        if self.error:
            raise self.error


@pytest.fixture
def loaded(monkeypatch):
    """Loading an entry gives its path."""
    monkeypatch.setattr(jit, "_load", lambda entry: ("loaded", entry.read_bytes()))


def test_a_disk_without_locks_still_keeps_kernels(monkeypatch, tmp_path, loaded):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert jit._through_disk(tmp_path, ("sm_80", False, ("k",)), Kernel) == ("loaded", b"half")
    assert jit._through_disk(tmp_path, ("sm_80", False, ("k",)), lambda: pytest.fail("built twice")) == (
        "loaded",
        b"half",
    )


def test_a_full_disk_costs_a_warning_and_leaves_nothing_behind(tmp_path, loaded):
    kernel = Kernel(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.warns(UserWarning, match="No space left"):
        assert jit._through_disk(tmp_path, ("sm_80", False, ("k",)), lambda: kernel) is kernel
    assert not list(tmp_path.glob("*.o"))


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path, loaded):
    file = tmp_path / "file"
    file.write_text("no directory: neither lock nor entry can be made in it")
    kernel = Kernel()
    with pytest.warns(UserWarning, match="could not keep"):
        assert jit._through_disk(file, ("sm_80", False, ("k",)), lambda: kernel) is kernel


def test_an_error_of_the_build_is_not_swallowed(tmp_path, loaded):
    with pytest.raises(ZeroDivisionError):
        jit._through_disk(tmp_path, ("sm_80", False, ("k",)), lambda: 1 / 0)


def test_the_lock_keeps_others_out(tmp_path):
    with disk.file_lock(tmp_path / "lock"), open(tmp_path / "lock", "w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_lock_is_given_back_although_a_child_has_the_file(tmp_path):
    """A child that was forked while the lock was held must not keep it."""
    with disk.file_lock(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            threading.Event().wait(20)
            os._exit(0)
    try:
        with open(tmp_path / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A copy of the package's sources, and its fingerprint taken anew at each call."""
    root = tmp_path / "fa4"
    shutil.copytree(jit._PACKAGE, root, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(jit, "_PACKAGE", root)
    return SimpleNamespace(root=root, fingerprint=jit.fingerprint.__wrapped__)


def test_the_fingerprint_holds_new_folders_and_changed_files(package):
    seen = {package.fingerprint()}
    new = package.root / "a_new_folder" / "kernel.py"
    new.parent.mkdir()
    new.write_text("x = 1")
    seen.add(package.fingerprint())
    new.write_text("x = 2")
    seen.add(package.fingerprint())
    with (package.root / "sm80" / "forward.py").open("a") as file:
        file.write("# changed")
    seen.add(package.fingerprint())
    assert len(seen) == 4


def test_the_fingerprint_holds_the_runtime_that_emulated_kernels_are_linked_to(package, monkeypatch, tmp_path):
    """Of warpcheck, which need not be installed."""
    before, host = package.fingerprint(), tmp_path / "host"
    shutil.copytree(jit._emulator_runtime(), host, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(jit, "_emulator_runtime", lambda: host)
    assert package.fingerprint() == before
    with (host / "intercept.c").open("a") as file:
        file.write("/* changed */")
    changed = package.fingerprint()
    monkeypatch.setattr(jit, "_emulator_runtime", lambda: None)
    assert len({before, changed, package.fingerprint()}) == 3


def test_the_fingerprint_is_blind_to_host_code(package):
    before = package.fingerprint()
    for part in ("cli/main.py", "emulator/cli.py"):
        (package.root / part).write_text("")
    assert package.fingerprint() == before


@pytest.mark.parametrize("name", ["apache-tvm-ffi", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"])
def test_the_fingerprint_knows_the_compilers_versions(monkeypatch, package, tmp_path, name):
    before = package.fingerprint()
    assert dict(toolchain.versions())[name] == importlib.metadata.version(name)
    (tmp_path / f"{name.replace('-', '_')}-0.0.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(toolchain, "versions", toolchain.versions.__wrapped__)
    assert dict(toolchain.versions())[name] == "0.0.0" and package.fingerprint() != before


def test_the_toolkit_is_the_compilers():
    from cutlass.base_dsl.version_info import CUDA_VERSION

    assert toolchain.toolkit() == CUDA_VERSION.major and toolchain.runtime_library().is_file()


def test_the_fingerprint_knows_the_compilers_settings(monkeypatch, package):
    before = package.fingerprint()
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    assert package.fingerprint() != before


def _imports(path: Path) -> tuple[bool, set[Path]]:
    """Whether a module imports CuTe DSL when it is loaded, and the files below the package that it imports then."""
    uses_dsl, files = False, set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            uses_dsl |= any(name.name.split(".")[0] == "cutlass" for name in node.names)
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            uses_dsl |= (node.module or "").split(".")[0] == "cutlass"
            continue
        base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for candidate in (base, *(base / name.name for name in node.names)):
            files |= {file for file in (candidate.with_suffix(".py"), candidate / "__init__.py") if file.is_file()}
    return uses_dsl, files - {jit._PACKAGE / "__init__.py"}


def test_all_device_code_is_in_the_fingerprint():
    """What imports CuTe DSL, and what that imports in turn."""
    sources = [path for path in jit._PACKAGE.rglob("*.py") if "emulator" not in path.parts]
    todo = [path for path in sources if _imports(path)[0]]
    reached = set(todo)
    while todo:
        new = _imports(todo.pop())[1] - reached
        reached |= new
        todo += new
    missing = reached - set(jit.device_sources())
    assert len(reached) > 30
    assert not missing, f"declared HOST_ONLY but reached from device code: {sorted(missing)}"


def test_host_only_names_exist():
    assert not [name for name in jit.HOST_ONLY if not (jit._PACKAGE / name).exists()]


def _qkv(seed: int):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 20, 2, 64)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_() for _ in range(3)]


def test_a_dry_run_leaves_nothing_behind(monkeypatch, seed):
    """Launchers that do nothing must not be found by the calls that come after, forward or backward."""
    q, k, v = _qkv(seed)
    with emulate("sm_80"):
        with jit.compile_only() as dry, monkeypatch.context() as patch:
            patch.setattr(jit, "compile_kernel", lambda *args, chip: None)
            fa4.flash_attn_func(q, k, v, causal=True, deterministic=True).sum().backward()
        assert [(target, key[0]) for target, key in dry.seconds] == [
            ("sm_80", "sm80.forward"),
            ("sm_80", "sm80.backward"),
        ]
        grads = []
        for backend in ("sm80", "torch"):
            for x in (q, k, v):
                x.grad = None
            # In order, as in the tests of layouts, whose kernels these are.
            out = fa4.flash_attn_func(q, k, v, causal=True, deterministic=True, backend=backend)
            out.sum().backward()
            grads.append([out.detach().float(), *(x.grad.float() for x in (q, k, v))])
    for ours, torchs in zip(*grads):
        torch.testing.assert_close(ours, torchs, atol=0.05, rtol=0.05)


def test_each_dry_run_compiles_anew(monkeypatch, seed):
    q, k, v = _qkv(seed)
    compiled = []
    monkeypatch.setattr(jit, "compile_kernel", lambda *args, chip: compiled.append(chip))
    with emulate("sm_80"):
        for runs in (1, 2):
            with jit.compile_only() as dry, torch.no_grad():
                fa4.flash_attn_func(q, k, v)
                fa4.flash_attn_func(q, k, v)
            assert len(dry.seconds) == 1 and len(compiled) == runs


def test_dry_runs_and_emulated_chips_belong_to_their_thread():
    seen = []
    with emulate("sm_80"), jit.compile_only() as dry:
        thread = threading.Thread(target=lambda: seen.append(chip_of(torch.device("cpu"))))
        thread.start()
        thread.join()
        here = chip_of(torch.device("cpu"))
    assert here.emulated and here.dry_run is dry
    assert seen[0].number == 0 and seen[0].dry_run is None


_FORK = """
import os, signal, threading
from fa4.runtime import jit
from fa4.runtime.device import chip_by_number
jit.cache_directory = lambda: None
inside, leave = threading.Event(), threading.Event()
def build():
    inside.set()
    leave.wait()
thread = threading.Thread(target=lambda: jit.compiled(("slow",), build, chip_by_number(80)))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    jit.compiled(("quick",), lambda: print, chip_by_number(80))
    os._exit(0)
status = os.waitpid(child, 0)[1]
leave.set()
thread.join()
raise SystemExit(status != 0)
"""


def test_a_child_forked_during_a_compilation_can_compile():
    subprocess.run([sys.executable, "-c", _FORK], check=True)


def test_a_chip_without_a_target_is_refused_with_the_reason():
    chip = jit.Chip("cuda", number=130)
    with pytest.raises(ValueError, match=r"no kernel can be compiled for sm_130 \(.*nothing that runs on sm_130"):
        jit.compiled(("k",), lambda: None, chip)


def test_an_emulated_and_a_real_chip_share_no_launcher(monkeypatch):
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: None)
    chips = chip_by_number(80), chip_by_number(80, emulated=True)
    launchers = [jit.compiled(("k",), object, chip) for chip in chips]
    assert launchers[0] is not launchers[1]


def test_what_was_compiled_for_a_real_chip_is_not_loaded_by_an_emulated_one(tmp_path):
    """Its machine code would be found, but no PTX, and it calls the real runtime."""
    from cutlass.cute.runtime import load_module

    (tmp_path / "kernel.o").write_bytes(b"an object file without PTX behind it")
    with emulate("sm_80"), pytest.raises(EmulationError, match="carries no PTX"):
        load_module(str(tmp_path / "kernel.o"), enable_tvm_ffi=True)
