"""Free host memory, on machines and in containers of several kinds."""

import os

import pytest

from megatrain_jax.host.memory import anonymous_memory, grows, host_memory

GIB = 1 << 30


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def machine(total, available):
    return {
        "proc/meminfo": f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\nHugetlb: x\n"
    }


def group(folder, limit, used, cache=0, *, version=2):
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    top = f"sys/fs/cgroup/{'memory/' if version == 1 else ''}{folder}"
    stat = f"anon 5\n{names[2]} {cache}\n"
    return {f"{top}/{names[0]}": f"{limit}\n", f"{top}/{names[1]}": f"{used}\n", f"{top}/memory.stat": stat}


def belongs_to(path, version=2):
    return {
        "proc/self/cgroup": f"0::{path}\n" if version == 2 else f"9:cpu,cpuacct:/x\n8:memory:{path}\n1:name=systemd:/\n"
    }


def test_here():
    free = host_memory()
    assert free is None or 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_where_nothing_is_known_nothing_is_said(tmp_path):
    assert host_memory(tmp_path) is None and not grows(tmp_path)


def test_a_machine_has_what_it_can_give_without_swapping(tmp_path):
    assert host_memory(write(tmp_path, machine(64 * GIB, 40 * GIB))) == 40 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path, where", [("/", ""), ("/docker/1", ""), ("/slurm/job_1", "slurm"), ("/a/b/c", "a/b/c")])
def test_a_tighter_container_counts_wherever_its_limit_is(tmp_path, version, path, where):
    files = machine(64 * GIB, 40 * GIB) | belongs_to(path, version)
    write(tmp_path, files | group(where, 16 * GIB, 6 * GIB, 2 * GIB, version=version))
    assert host_memory(tmp_path) == 12 * GIB


@pytest.mark.parametrize("version, none", [(1, 9223372036854771712), (2, "max")])
def test_a_group_without_a_limit_is_no_limit(tmp_path, version, none):
    write(tmp_path, machine(64 * GIB, 40 * GIB) | belongs_to("/a", version) | group("a", none, 1, version=version))
    assert host_memory(tmp_path) == 40 * GIB


def test_of_nested_groups_the_tightest_counts(tmp_path):
    outer, inner = group("a", 16 * GIB, 9 * GIB), group("a/b", 12 * GIB, 1 * GIB)
    write(tmp_path, machine(64 * GIB, 40 * GIB) | belongs_to("/a/b") | outer | inner)
    assert host_memory(tmp_path) == 7 * GIB


def test_a_limit_above_the_machine_frees_nothing(tmp_path):
    write(tmp_path, machine(64 * GIB, 40 * GIB) | belongs_to("/") | group("", 128 * GIB, 1 * GIB))
    assert host_memory(tmp_path) == 40 * GIB


def test_a_group_that_is_over_its_limit_has_nothing(tmp_path):
    write(tmp_path, machine(64 * GIB, 40 * GIB) | belongs_to("/") | group("", 2 * GIB, 3 * GIB))
    assert host_memory(tmp_path) == 0


def test_where_memory_is_added_on_demand_a_limit_is_a_promise_and_nothing_else_is(tmp_path):
    device = "sys/bus/virtio/drivers/virtio_mem/virtio4/modalias"
    write(tmp_path, machine(31 * GIB, 30 * GIB) | belongs_to("/") | {device: ""})
    assert grows(tmp_path) and host_memory(tmp_path) == 30 * GIB
    write(tmp_path, group("", 256 * GIB, 2 * GIB, 1 * GIB))
    assert host_memory(tmp_path) == 255 * GIB
    write(tmp_path, group("", 20 * GIB, 2 * GIB))
    assert host_memory(tmp_path) == 18 * GIB


def test_what_this_process_has_taken_is_read_from_the_system(tmp_path):
    status = tmp_path / "proc/self/status"
    assert anonymous_memory(tmp_path) == 0
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tpython\nVmRSS:\t   900 kB\nRssAnon:\t   512 kB\nRssFile:\t 388 kB\n")
    assert anonymous_memory(tmp_path) == 512 * 1024
    assert anonymous_memory() > 1 << 20
