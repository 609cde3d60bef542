"""The disk cache: closed to others, and no larger or older than its limits, whoever uses it meanwhile."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa4.cli.main import main
from fa4.runtime import disk, jit
from fa4.runtime.device import chip_by_number

DAY = 24 * 3600


def an_entry(root, number, days=0.0, size=1000, folder="f" * 16):
    """A file as a process that compiled leaves it, last used some days ago."""
    path = root / folder / f"{number:032x}.o"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    disk.lock_of(path).touch()
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def export_nothing(kernel, directory, full_key, names):
    """An empty entry in place of a kernel."""
    entry = jit._entry(directory, full_key)
    entry.write_bytes(b"")
    return entry


def left(root):
    return [int(entry.path.name[:32], 16) for entry in disk.entries(root)]


def test_what_is_old_goes_and_then_the_longest_unused(tmp_path):
    for number, days in enumerate((40, 31, 29, 3, 2, 0)):
        an_entry(tmp_path, number, days, folder=f"{number % 2:016x}")
    assert len(disk.prune(tmp_path, 30 * DAY, float("inf"))) == 2 and left(tmp_path) == [2, 3, 4, 5]
    assert len(disk.prune(tmp_path, float("inf"), 2500)) == 2 and left(tmp_path) == [4, 5]
    assert disk.prune(tmp_path, 30 * DAY, 2500) == []
    assert len(list(tmp_path.rglob("*.lock"))) == 2


def test_nothing_but_entries_is_removed(tmp_path):
    """Of a directory that holds other things, too."""
    others = [
        "notes.o",
        "f" * 32 + ".o",
        "0123456789abcdef/x.o",
        "sources/" + "f" * 32 + ".o",
        "0123456789abcdef/a.txt",
    ]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    unfinished = an_entry(tmp_path, 1, 99).rename(tmp_path / ("f" * 16) / f"{1:032x}.{2:032x}.o")
    assert [entry.path for entry in disk.prune(tmp_path, 0, 0)] == [unfinished]
    assert all((tmp_path / name).exists() for name in others)
    assert not (tmp_path / ("f" * 16)).exists()


_HOLDER = """
import sys
from pathlib import Path
from fa4.runtime import disk
with disk.file_lock(disk.lock_of(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_what_another_process_holds_stays(tmp_path):
    held, free = an_entry(tmp_path, 1, 99), an_entry(tmp_path, 2, 99)
    command = [sys.executable, "-c", _HOLDER, str(held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        disk.prune(tmp_path, 0, 0)
        assert held.exists() and not free.exists()
        holder.communicate("\n")
    disk.prune(tmp_path, 0, 0)
    assert not held.exists()


def test_what_was_loaded_after_it_was_found_old_stays(tmp_path, monkeypatch):
    path = an_entry(tmp_path, 1, 99)
    found = disk.entries(tmp_path)
    monkeypatch.setattr(disk, "entries", lambda root: found)
    disk.used(path)
    assert disk.prune(tmp_path, DAY, 0) == [] and path.exists()


def test_who_waited_for_a_lock_that_was_removed_takes_the_new_one(tmp_path):
    """Else two would hold "the" lock of an entry: one of the old file, one of the new."""
    path, order = tmp_path / "x.lock", []

    def wait():
        with disk.file_lock(path) as held, open(path) as file:
            order.append(held and disk._is_still_there(file, path))

    with disk.file_lock(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        path.unlink()
    waiting.join(10)
    with disk.file_lock(path, wait=False) as held:
        assert order == [True] and held


def test_an_entry_on_its_way_into_an_emptied_folder_stays(tmp_path, monkeypatch):
    """Removal of a folder's last entry takes what lies beside it, and nothing that another process adds meanwhile."""
    folder = tmp_path / ("f" * 16)
    folder.mkdir()
    (folder / f"{'a' * 32}.o").write_bytes(b"old")
    beside, arriving = folder / sorted(disk._BESIDE)[0], folder / f"{'b' * 32}.{'c' * 32}.o"
    beside.write_text("")
    files = disk._files

    def then_another(of):
        found = files(of)
        if of == folder and {path.name for path in found} == {beside.name}:
            arriving.write_bytes(b"new")
        return found

    monkeypatch.setattr(disk, "_files", then_another)
    assert len(disk.prune(tmp_path, -1, 0)) == 1
    assert arriving.read_bytes() == b"new" and not beside.exists()


_PRUNER = """
import sys, time
from pathlib import Path
from fa4.runtime import disk
stop = time.monotonic() + 2
while time.monotonic() < stop:
    disk.prune(Path(sys.argv[1]), -1, 0)
"""


@pytest.mark.rotates(2)
def test_processes_that_remove_and_a_process_that_compiles(tmp_path, monkeypatch):
    """What is exported is loaded, whoever removes entries meanwhile: under the lock it is there."""

    class Kernel:
        def export_to_c(self, path, symbol):
            Path(path).write_bytes(b"whole")

    monkeypatch.setattr(jit, "_load", lambda entry: entry.read_bytes())
    monkeypatch.setattr(jit, "fingerprint", lambda: "another")
    folder = tmp_path / ("f" * 16)
    folder.mkdir()
    pruners = [subprocess.Popen([sys.executable, "-c", _PRUNER, str(tmp_path)]) for _ in range(2)]
    rounds = 0
    while any(process.poll() is None for process in pruners):
        assert jit._through_disk(folder, ("sm_80", False, ("key", rounds % 3)), Kernel) == b"whole"
        rounds += 1
    assert rounds > 10 and not any(process.returncode for process in pruners)


def test_limits_of_the_environment(monkeypatch):
    assert disk.limits() == (30 * DAY, 4e9)
    monkeypatch.setenv("FA4_CACHE_DAYS", "0")
    monkeypatch.setenv("FA4_CACHE_GB", "0.5")
    assert disk.limits() == (float("inf"), 5e8)
    for wrong in ("week", "-1", "nan"):
        monkeypatch.setenv("FA4_CACHE_DAYS", wrong)
        with pytest.raises(ValueError, match=f"FA4_CACHE_DAYS is '{wrong}', expected a number of 0 or more"):
            disk.limits()


def test_a_root_is_tended_once_a_day_unless_it_was_compiled_ahead(tmp_path, monkeypatch):
    an_entry(tmp_path, 1, 99)
    disk.keep(tmp_path)
    disk.prune_daily(tmp_path)
    assert left(tmp_path) == [1]
    (tmp_path / "kept").unlink()
    disk.prune_daily(tmp_path)
    assert left(tmp_path) == []
    an_entry(tmp_path, 2, 99)
    disk.prune_daily(tmp_path)
    assert left(tmp_path) == [2]
    os.utime(tmp_path / "tended", (time.time() - 2 * DAY,) * 2)
    disk.prune_daily(tmp_path)
    assert left(tmp_path) == []


def test_a_wrong_limit_is_warned_of_once_and_the_kernel_is_kept(tmp_path, monkeypatch):
    """It was taken for a kernel that could not be kept, which was built twice."""
    monkeypatch.setattr(jit, "_export", export_nothing)
    monkeypatch.setattr(jit, "_load", lambda entry: entry.name)
    monkeypatch.setattr(jit, "fingerprint", lambda: "f" * 16)
    folder, built = tmp_path / ("f" * 16), []
    folder.mkdir()
    old = an_entry(tmp_path, 1, 99)
    monkeypatch.setenv("FA4_CACHE_DAYS", "abc")
    with pytest.warns(UserWarning, match="removes no .* FA4_CACHE_DAYS is 'abc', expected a number of 0 or") as warned:
        for number in range(3):
            jit._through_disk(folder, ("sm_80", False, ("key", number)), lambda: built.append("kernel"))
    assert len(warned) == 1 and len(built) == 3 and old.exists()
    monkeypatch.delenv("FA4_CACHE_DAYS")
    disk.prune_daily(tmp_path)
    assert not old.exists()


@pytest.mark.parametrize("mode, taken", [(0o755, True), (0o777, False), (0o1777, True), (0o757, False), (0o700, True)])
def test_a_directory_above_that_others_may_write(tmp_path, mode, taken):
    above = tmp_path / "above"
    root = above / "between" / "root"
    root.mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    if taken:
        disk.check_private(root)
    else:
        with pytest.raises(PermissionError, match=r"others may replace what is in .*above"):
            disk.check_private(root)


def test_a_directory_above_of_somebody_else(tmp_path):
    if os.getuid():
        pytest.skip("only root may give a directory away")
    root = tmp_path / "theirs" / "root"
    root.mkdir(parents=True, mode=0o700)
    os.chown(root.parent, 12345, -1)
    with pytest.raises(PermissionError, match=r"others may replace what is in .*theirs"):
        disk.check_private(root)
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(PermissionError, match=r"others may replace what is in .*theirs"):
        disk.check_private(link)


def test_the_command_shows_and_cleans(tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    for number, days in enumerate((99, 1, 0)):
        an_entry(tmp_path, number, days, size=2_000_000, folder=f"{number:016x}")

    def run(*options):
        result = CliRunner().invoke(main, ["cache", *options])
        assert result.exit_code == 0, result.output
        return result.output

    assert f"{tmp_path}: 3 kernels" in run() and left(tmp_path) == [0, 1, 2]
    assert "removed 1 kernels, 2.0 MB" in run("--clean") and left(tmp_path) == [1, 2]
    disk.keep(tmp_path)
    monkeypatch.setenv("FA4_CACHE_GB", "0.001")
    assert "nothing is removed from a directory of `fa4 compile`" in run("--clean") and left(tmp_path) == [1, 2]
    assert "removed 2 kernels" in run("--all") and left(tmp_path) == []
    assert "0 kernels" in run()


def test_a_kernel_on_disk_does_not_wait_for_a_compilation(tmp_path, monkeypatch):
    """Nor does anybody compile while another thread does: CuTe DSL compiles one kernel at a time."""
    monkeypatch.setattr(jit, "_launchers", {})
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(jit, "fingerprint", lambda: "another")
    monkeypatch.setattr(jit, "_export", export_nothing)
    monkeypatch.setattr(jit, "_load", lambda entry: entry.name)
    chip, inside, leave, built = chip_by_number(80), threading.Event(), threading.Event(), []
    jit.compiled(("there",), object, chip)
    jit._launchers.clear()

    def slow():
        built.append("slow")
        inside.set()
        assert leave.wait(20)
        built.append("slow's end")

    threads = [threading.Thread(target=jit.compiled, args=(("slow",), slow, chip))]
    threads[0].start()
    assert inside.wait(20)
    loading = threading.Thread(target=jit.compiled, args=(("there",), lambda: built.append("there"), chip))
    loading.start()
    loading.join(20)
    assert not loading.is_alive() and built == ["slow"]
    threads += [threading.Thread(target=jit.compiled, args=(("other",), lambda: built.append("other"), chip))]
    threads += [threading.Thread(target=jit.compiled, args=(("slow",), lambda: built.append("twice"), chip))]
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.1)
    leave.set()
    for thread in threads:
        thread.join(20)
    assert built == ["slow", "slow's end", "other"]
