"""Cores and memory that a process may use: affinity and control groups of both versions, its own and its parents'."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from kvweave import machine
from kvweave.machine import CpuLimits, available_memory_bytes, cpu_limits, memory_limit_bytes


def put(root: Path, path: str, content: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content + "\n")


def named(root: Path, lines: str) -> tuple[Path, Path]:
    (root / "own").write_text(lines)
    return root, root / "own"


def test_the_cores_are_those_of_the_affinity():
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:1])
        assert cpu_limits().cores == 1
    finally:
        os.sched_setaffinity(0, cores)
    assert cpu_limits().cores == len(cores)


def test_version_2_takes_the_smallest_quota_of_the_group_and_its_parents(tmp_path):
    put(tmp_path, "pod/cpu.max", "150000 100000")
    put(tmp_path, "pod/box/cpu.max", "max 100000")
    assert cpu_limits(*named(tmp_path, "0::/pod/box\n")).quota == 1.5
    put(tmp_path, "pod/box/cpu.max", "50000 100000")
    assert cpu_limits(*named(tmp_path, "0::/pod/box\n")).quota == 0.5
    assert cpu_limits(*named(tmp_path, "0::/other\n")).quota is None


def test_version_1_reads_quota_and_period(tmp_path):
    put(tmp_path, "cpu/docker/cpu.cfs_quota_us", "300000")
    put(tmp_path, "cpu/docker/cpu.cfs_period_us", "100000")
    put(tmp_path, "cpu/docker/inner/cpu.cfs_quota_us", "-1")
    put(tmp_path, "cpu/docker/inner/cpu.cfs_period_us", "100000")
    assert cpu_limits(*named(tmp_path, "4:cpu,cpuacct:/docker/inner\n1:name=systemd:/\n")).quota == 3.0


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path):
    put(tmp_path, "cpu.max", "200000 100000")
    put(tmp_path, "memory.max", "1000000")
    own = named(tmp_path, "0::/kubepods/pod123/abc\n")
    assert cpu_limits(*own).quota == 2.0
    assert memory_limit_bytes(*own) == 1_000_000


@pytest.mark.parametrize(
    ("cores", "quota", "threads"), [(8, None, 8), (8, 4.0, 4), (8, 2.5, 2), (8, 0.5, 1), (2, 4.0, 2)]
)
def test_threads_run_at_once_without_being_throttled(cores, quota, threads):
    assert CpuLimits(cores, quota).threads == threads


def test_page_cache_that_a_group_can_drop_is_available(tmp_path):
    put(tmp_path, "a/memory.max", "1000000")
    put(tmp_path, "a/memory.current", "900000")
    put(tmp_path, "a/memory.stat", "anon 500000\ninactive_file 300000")
    assert available_memory_bytes(*named(tmp_path, "0::/a\n")) == 400_000
    put(tmp_path, "memory/b/memory.limit_in_bytes", "2000000")
    put(tmp_path, "memory/b/memory.usage_in_bytes", "900000")
    put(tmp_path, "memory/b/memory.stat", "cache 1\ntotal_inactive_file 100000")
    assert available_memory_bytes(*named(tmp_path, "7:memory:/b\n")) == 1_200_000
    machine = psutil.virtual_memory().available
    assert available_memory_bytes(*named(tmp_path, "0::/\n")) == pytest.approx(machine, rel=0.2)


def test_damaged_files_limit_nothing(tmp_path):
    put(tmp_path, "a/cpu.max", "what")
    put(tmp_path, "a/memory.max", "")
    own = named(tmp_path, "0::/a\n")
    assert cpu_limits(*own).quota is None
    assert memory_limit_bytes(*own) is None


@pytest.fixture
def two_threads(monkeypatch):
    """Make PyTorch compute with two threads, as if by default, under a quota of one core."""
    for name in machine.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "cpu_limits", lambda: CpuLimits(2, 1.0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_quota_lowers_the_number_of_threads():
    assert machine.respect_cpu_limits() == 1 == torch.get_num_threads()


@pytest.mark.usefixtures("two_threads")
def test_a_number_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine.respect_cpu_limits() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(machine, "cpu_limits", lambda: CpuLimits(8, 1.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical=True: 8)
    assert machine.respect_cpu_limits() == 2  # not the default of a machine with 8 cores


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("name", "shapes"), [("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"), ("LRU_CACHE_CAPACITY", "8")]
)
def test_few_shapes_are_kept_unless_the_user_chose_a_number(monkeypatch, name, shapes):
    monkeypatch.delenv(name, raising=False)
    machine.respect_cpu_limits()
    assert os.environ[name] == shapes
    monkeypatch.setenv(name, "7")
    machine.respect_cpu_limits()
    assert os.environ[name] == "7"


@pytest.mark.root
def test_a_real_quota_of_version_1(tmp_path):
    group = Path("/sys/fs/cgroup/cpu") / f"kvweave-test-{os.getpid()}"
    if os.geteuid() != 0 or not (group.parent / "cpu.cfs_quota_us").exists():
        pytest.skip("needs root and the cpu controller of version 1 at /sys/fs/cgroup/cpu")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    script = (
        f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
        "from kvweave.machine import cpu_limits\n"
        "print(cpu_limits().quota, cpu_limits().threads)"
    )
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    assert done.stdout.split() == ["1.0", "1"]


_ALLOCATIONS = """
import ctypes, sys, threading, time
from kvweave.machine import return_freed_memory

return_freed_memory(every_s=0.1)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
together = threading.Barrier(8)

def allocate():
    together.wait()  # all are alive
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.free(libc.malloc(16 << 20))  # by default, smaller ones would lie among others from now on
libc.malloc(8 << 20)
def anonymous_mb():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

blocks = [libc.malloc(64 << 10) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
full = anonymous_mb()
for block in blocks[::2]:  # no gap is at an end
    libc.free(block)
until = time.monotonic() + 20
while anonymous_mb() > full - 20 and time.monotonic() < until:
    time.sleep(0.05)
print(full - anonymous_mb() > 20)
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 2
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="glibc's arenas")
def test_freed_memory_is_shared_and_returned_unless_the_user_chose_otherwise(tmp_path):
    def arenas_and_mapped(**variables):
        told = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        command = [sys.executable, "-c", _ALLOCATIONS, tmp_path / "info"]
        done = subprocess.run(command, env=told | variables, check=True, capture_output=True, text=True)
        assert done.stdout == "True\n"  # gaps were returned
        info = (tmp_path / "info").read_text()
        (mapped,) = re.findall(r'<total type="mmap" count="\d+" size="(\d+)"', info)
        return info.count("<heap nr"), int(mapped) >= 8 << 20

    arenas, mapped = arenas_and_mapped()
    assert arenas <= 2
    assert mapped
    arenas, mapped = arenas_and_mapped(MALLOC_ARENA_MAX="7", MALLOC_MMAP_THRESHOLD_=str(32 << 20))
    assert arenas > 2
    assert not mapped


@pytest.mark.parametrize(
    ("given", "looks"), [({}, "3000"), ({"OMP_WAIT_POLICY": "passive"}, "0"), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_threads_of_a_command_and_of_its_processes_soon_sleep_unless_told_otherwise(given, looks):
    (openmp,) = set(re.findall(r"/\S+/torch\S*/libgomp\S+", Path("/proc/self/maps").read_text()))
    code = f"""
import subprocess, sys
from kvweave.__main__ import main
sys.argv = ["kvweave", "--version"]
try:
    main()
finally:
    load = "import ctypes; ctypes.CDLL({openmp!r})"  # PyTorch's, without the rest of PyTorch
    subprocess.run([sys.executable, "-c", load], check=True)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **given, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{looks}'" in done.stderr  # how often a thread looks before it sleeps
