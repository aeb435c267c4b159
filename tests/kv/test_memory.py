"""Memory budgets from their definitions, and the refusal of memory that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvloom.errors import CapacityError, ConfigError
from kvloom.kv.host_memory import read_available_host_bytes
from kvloom.kv.memory import (
    GIB,
    MIB,
    NEURON_STACK_BYTES,
    CudaMemory,
    HostMemory,
    MemoryUse,
    NeuronCap,
    NeuronMemory,
    check_available_now,
    cpu_budget,
    cuda_budget,
    explicit_budget,
    format_bytes,
    neuron_capped_budget,
    neuron_headroom_budget,
)

USE = MemoryUse(weights_bytes=3 * GIB, activation_bytes=GIB)


def labels_and_bytes(budget) -> list[tuple[str, int]]:
    return [(line.label, line.num_bytes) for line in budget.lines]


def test_cpu_takes_a_share_of_what_was_available_at_start():
    budget = cpu_budget(HostMemory(20 * GIB, 17 * GIB), 0.5, USE)
    assert budget.kv_bytes == 6 * GIB
    assert labels_and_bytes(budget) == [
        ("available at start", 20 * GIB),
        ("x share 0.5", 10 * GIB),
        ("- weights", 3 * GIB),
        ("- peak activation", GIB),
        ("= for KV", 6 * GIB),
    ]


def test_cpu_ranks_divide_the_host():
    budget = cpu_budget(HostMemory(20 * GIB, 14 * GIB, num_ranks=2), 0.5, USE)
    assert budget.kv_bytes == 5 * GIB - 4 * GIB
    assert ("x share 0.5 over 2 ranks", 5 * GIB) in labels_and_bytes(budget)


def test_cpu_budget_without_room_is_left_to_the_planner():
    assert cpu_budget(HostMemory(7 * GIB, 0), 0.5, USE).kv_bytes == -GIB // 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cpu_share_that_is_not_there_now_is_refused_with_one_that_is(num_ranks):
    # 40 GiB at start, weights loaded, and 20 GiB since taken by others.
    host = HostMemory(40 * GIB, 40 * GIB - num_ranks * 3 * GIB - 20 * GIB, num_ranks)
    with pytest.raises(CapacityError, match="close other programs") as refusal:
        cpu_budget(host, 0.9, USE)
    share = float(re.search(r"memory_share to at most (\d\.\d+)", str(refusal.value))[1])
    assert cpu_budget(host, share, USE).kv_bytes > 0
    with pytest.raises(CapacityError):
        cpu_budget(host, share + 0.01, USE)


def test_cpu_needs_room_for_the_activations_as_well():
    """KV alone would fit into what is available; the peak of a step beside it would not."""
    use = MemoryUse(weights_bytes=0, activation_bytes=4 * GIB)
    assert cpu_budget(HostMemory(20 * GIB, 10 * GIB), 0.5, use).kv_bytes == 6 * GIB
    with pytest.raises(CapacityError):
        cpu_budget(HostMemory(20 * GIB, 10 * GIB - 1), 0.5, use)


def test_bytes_named_by_the_user_are_taken_as_they_are():
    budget = explicit_budget(5 * GIB, USE)
    assert budget.kv_bytes == 5 * GIB
    check_available_now(budget, HostMemory(0, 6 * GIB), "set kv_cache_bytes lower")
    with pytest.raises(CapacityError, match="set kv_cache_bytes lower"):
        check_available_now(budget, HostMemory(0, 6 * GIB - 1), "set kv_cache_bytes lower")


def test_cuda_takes_a_share_of_the_whole_device():
    assert cuda_budget(CudaMemory(80 * GIB), 0.5, USE).kv_bytes == 36 * GIB


def test_cuda_foreign_use_limits_the_ceiling_and_nothing_else():
    assert cuda_budget(CudaMemory(80 * GIB, 40 * GIB), 0.5, USE).kv_bytes == 36 * GIB
    with pytest.raises(CapacityError, match=r"at most 0\.49"):
        cuda_budget(CudaMemory(80 * GIB, 40 * GIB + 1), 0.5, USE)


@pytest.mark.parametrize(
    ("device", "cores", "logical_gib"),
    [("trn2", 2, 24), ("trn2", 1, 12), ("trn3", 2, 36), ("trn3", 1, 18)],
)
def test_logical_core_memory(device, cores, logical_gib):
    memory = NeuronMemory(NEURON_STACK_BYTES[device], cores)
    assert memory.logical_core_bytes == logical_gib * GIB


def test_neuron_default_is_capped():
    """Trn2, LNC 2, share 0.9: 21.6 GiB, of which KV gets at most 0.3: 6.48 GiB."""
    budget = neuron_capped_budget(NeuronMemory(24 * GIB), USE, NeuronCap(0.9))
    assert budget.kv_bytes == int(int(24 * GIB * 0.9) * 0.30)
    assert format_bytes(budget.kv_bytes) == "6.48 GiB"
    # A rank of Llama-3.3-70B over 16: 40,960 B per token, about 169.9k tokens.
    assert budget.kv_bytes // 40_960 == pytest.approx(169_900, rel=1e-3)


def test_neuron_cap_gives_way_to_weights():
    use = MemoryUse(weights_bytes=20 * GIB, activation_bytes=0)
    budget = neuron_capped_budget(NeuronMemory(24 * GIB), use, NeuronCap(0.9))
    assert budget.kv_bytes == int(24 * GIB * 0.9) - 20 * GIB


def test_neuron_minimum_budget():
    device = NeuronMemory(12 * GIB)
    total = int(6 * GIB * 0.9)
    one_core = NeuronMemory(12 * GIB, 1)
    edge = MemoryUse(weights_bytes=total - GIB, activation_bytes=0)
    assert neuron_capped_budget(one_core, edge, NeuronCap(0.9)).kv_bytes == GIB
    message = r"1,073,741,823 B are left .* minimum is 1\.00 GiB \(1,073,741,824 B\)"
    with pytest.raises(CapacityError, match=message):
        neuron_capped_budget(one_core, MemoryUse(total - GIB + 1, 0), NeuronCap(0.9))
    with pytest.raises(CapacityError, match="0 B are left"):
        neuron_capped_budget(device, MemoryUse(100 * GIB, 0), NeuronCap(0.9))
    assert neuron_capped_budget(device, edge, NeuronCap(0.9, min_bytes=0)).kv_bytes > 0


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_neuron_cap_fraction_is_within_bounds(fraction):
    with pytest.raises(ConfigError, match="cap_fraction"):
        NeuronCap(0.9, cap_fraction=fraction)


def test_neuron_headroom_replaces_share_and_cap():
    device = NeuronMemory(24 * GIB)
    assert neuron_headroom_budget(device, USE, 4 * GIB).kv_bytes == 17 * GIB
    assert neuron_headroom_budget(device, USE, 0).kv_bytes == 21 * GIB
    assert neuron_headroom_budget(device, USE, 30 * GIB).kv_bytes == 0


@pytest.mark.parametrize(
    "budget",
    [
        cpu_budget(HostMemory(20 * GIB, 17 * GIB), 0.5, USE),
        cuda_budget(CudaMemory(80 * GIB), 0.5, USE),
        neuron_capped_budget(NeuronMemory(24 * GIB), USE, NeuronCap(0.9)),
        neuron_headroom_budget(NeuronMemory(24 * GIB), USE, GIB),
        explicit_budget(GIB, USE),
    ],
)
def test_every_budget_explains_itself(budget):
    assert budget.use == USE
    assert labels_and_bytes(budget)[-1][1] == budget.kv_bytes
    assert USE.weights_bytes in [line.num_bytes for line in budget.lines]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (-GIB, "-1.00 GiB"), (3 << 40, "3.00 TiB")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"


def test_host_memory_is_the_kernels_estimate(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert read_available_host_bytes(tmp_path) == 8 * GIB
    write(tmp_path, {"proc/self/cgroup": "0::/user.slice\n"})
    assert read_available_host_bytes(tmp_path) == 8 * GIB


def test_host_without_meminfo_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        read_available_host_bytes(tmp_path)


@pytest.mark.parametrize("limited", ["app", "app/job"])
def test_cgroup_v2_limit_at_any_level(tmp_path, limited):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/app/job\n"}
    for group in ("app", "app/job"):
        limit = str(3 * GIB) if group == limited else "max"
        files |= {
            f"sys/fs/cgroup/{group}/memory.max": f"{limit}\n",
            f"sys/fs/cgroup/{group}/memory.current": f"{2 * GIB}\n",
            f"sys/fs/cgroup/{group}/memory.stat": f"anon 5\ninactive_file {512 * MIB}\n",
        }
    write(tmp_path, files)
    # What the kernel could drop of the group's page cache counts as available.
    assert read_available_host_bytes(tmp_path) == GIB + 512 * MIB


def test_cgroup_v1_limit(tmp_path):
    group = "sys/fs/cgroup/memory/docker/1234"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpuset:/docker/1234\n4:cpu,memory:/docker/1234\n0::/docker/1234\n",
        f"{group}/memory.limit_in_bytes": f"{3 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{2 * GIB}\n",
        f"{group}/memory.stat": f"cache 7\ntotal_inactive_file {256 * MIB}\n",
    }
    write(tmp_path, files)
    assert read_available_host_bytes(tmp_path) == GIB + 256 * MIB


@pytest.mark.parametrize(
    ("entry", "mount", "limit", "usage"),
    [
        ("0::/docker/1234", "sys/fs/cgroup", "memory.max", "memory.current"),
        (
            "4:memory:/docker/1234",
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_container_that_sees_its_group_as_the_mount_point(tmp_path, entry, mount, limit, usage):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": f"{entry}\n",
        f"{mount}/{limit}": f"{3 * GIB}\n",
        f"{mount}/{usage}": f"{GIB}\n",
        f"{mount}/memory.stat": "anon 1\n",
    }
    write(tmp_path, files)
    assert read_available_host_bytes(tmp_path) == 2 * GIB


def test_cgroup_over_its_limit_leaves_nothing(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.stat": "\n",
    }
    write(tmp_path, files)
    assert read_available_host_bytes(tmp_path) == 0


def test_this_machine_tells_its_memory():
    assert read_available_host_bytes() > 0
