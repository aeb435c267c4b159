"""What devices can do: memory, bandwidth and arithmetic of one rank, as their makers state them.

Peak numbers; how much of them a model reaches is the cost model's matter. Arithmetic is dense
bfloat16, never the doubled number for sparse matrices. A link's bandwidth is that of one direction:
makers state the sum of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.errors import ConfigError
from kvloom.kv.memory import CUDA_TOTAL_BYTES, MIB, NEURON_STACK_BYTES

_GB, _TB, _TFLOP = 10**9, 10**12, 10**12
# On Trainium a rank is a logical core of two physical ones: a quarter of the chip.
_LOGICAL_CORES = 4


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank runs on.

    Attributes:
        name: what users write.
        title: what the maker calls it.
        memory_bytes: as the driver reports it; None for a host, which has what it has.
        bytes_per_second: memory bandwidth.
        flops: bfloat16 operations per second; a multiply-add counts as two.
        link_bytes_per_second: to the other ranks, one direction.
        source: where the numbers are from.
    """

    name: str
    title: str
    memory_bytes: int | None
    bytes_per_second: float
    flops: float
    link_bytes_per_second: float
    source: str


def _gpu(name: str, title: str, memory_bytes: int, rates: tuple[float, ...], source: str) -> Device:
    """`rates`: TB/s of memory, TFLOP/s, GB/s of links in both directions."""
    memory, compute, links = rates
    return Device(
        name, title, memory_bytes, memory * _TB, compute * _TFLOP, links / 2 * _GB, source
    )


def _trainium(name: str, title: str, rates: tuple[float, ...], source: str) -> Device:
    """`rates` of a chip as for `_gpu`; a rank has its part of them."""
    part = tuple(rate / _LOGICAL_CORES for rate in rates)
    return _gpu(name, title, NEURON_STACK_BYTES[name], part, source)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "cpu",
            "Intel Xeon Platinum 8480+, one socket",
            None,
            8 * 4.8 * 8 * _GB,  # channels x GT/s x bytes
            56 * 2.0e9 * 2048,  # cores x base clock x operations of the matrix unit
            4 * 4.8 * 8 * _GB,  # ranks of a host exchange through memory: written, then read
            "Intel ARK: 56 cores, 2.0 GHz, 8 channels of DDR5-4800; optimisation manual: AMX",
        ),
        _gpu(
            "a100",
            "NVIDIA A100 SXM 80 GB",
            81_920 * MIB,
            (2.039, 312, 600),
            "NVIDIA A100 datasheet; memory as nvidia-smi reports it",
        ),
        _gpu(
            "h100",
            "NVIDIA H100 SXM 80 GB",
            CUDA_TOTAL_BYTES["h100"],
            (3.35, 989, 900),
            "NVIDIA H100 datasheet; memory as nvidia-smi reports it",
        ),
        _gpu(
            "h200",
            "NVIDIA H200 SXM 141 GB",
            CUDA_TOTAL_BYTES["h200"],
            (4.8, 989, 900),
            "NVIDIA H200 datasheet; memory as nvidia-smi reports it",
        ),
        _gpu(
            "b200",
            "NVIDIA B200 SXM 180 GB",
            182_630 * MIB,  # 178.35 GiB
            (7.67, 2250, 1800),
            "NVIDIA HGX B200 datasheet; memory and bus (7,680 bits, 3,996 MHz) as the driver "
            "reports them (pytorch/ao pull request 4002)",
        ),
        _gpu(
            "mi300x",
            "AMD Instinct MI300X 192 GB",
            206_141_652_992,
            (5.3, 1307.4, 896),
            "AMD MI300X datasheet; memory as rocm-smi reports it (ROCm issue 4750)",
        ),
        _trainium(
            "trn2",
            "AWS Trainium2, a logical core",
            (2.9, 667, 1280),
            "AWS Neuron documentation 2.32, a quarter of the chip",
        ),
        _trainium(
            "trn3",
            "AWS Trainium3, a logical core",
            (4.9, 671, 2560),
            "AWS Neuron documentation 2.32, a quarter of the chip",
        ),
        _gpu(
            "tpu-v5e",
            "Google TPU v5e",
            16 * _GB,
            (0.819, 197, 400),
            "Google Cloud TPU v5e documentation",
        ),
        _gpu(
            "tpu-v6e",
            "Google TPU v6e",
            32 * _GB,
            (1.638, 918, 800),
            "Google Cloud TPU v6e documentation",
        ),
    )
}


def find_device(name: str) -> Device:
    """The device of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in DEVICES:
        raise ConfigError(f"unknown device {name!r}; choose one of {', '.join(DEVICES)}")
    return DEVICES[name]
