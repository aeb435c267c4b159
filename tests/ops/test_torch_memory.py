"""The meter of a device's memory: results count while they live, and views and inputs do not."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

KIB = 1024


def test_results_count_while_something_holds_them() -> None:
    import torch

    from kvloom.ops.torch_memory import measure

    older = torch.ones(KIB)
    with measure(torch.device("cpu")) as meter:
        assert (meter.held_bytes, meter.peak_bytes) == (0, 0)
        first = older + 1
        view = first.view(32, 32)[3:]
        older.mul_(2)  # in place
        assert meter.held_bytes == 4 * KIB
        del first
        assert meter.held_bytes == 4 * KIB  # the view holds it
        second = torch.cat([view.flatten()[:512], older[:512]])
        assert (meter.held_bytes, meter.peak_bytes) == (8 * KIB, 8 * KIB)
        del view
        assert (meter.held_bytes, meter.peak_bytes) == (4 * KIB, 8 * KIB)
        meter.reset_peak()
        assert meter.peak_bytes == 4 * KIB
        del second
        torch.zeros(3 * KIB) + 1  # two results, of which none is kept
        assert (meter.held_bytes, meter.peak_bytes) == (0, 24 * KIB)


def test_zeros_and_views() -> None:
    import torch

    from kvloom.ops.torch_memory import measure

    with measure(torch.device("cpu")) as meter:
        zeros = meter.zeros((2, 3))
        assert zeros.dtype == torch.float32
        assert meter.held_bytes == 24
        assert meter.is_view(zeros[1], zeros)
        assert not meter.is_view(zeros + 0, zeros)
        assert not meter.is_view(zeros, (2, 3))


def test_only_cuda_tells_its_memory() -> None:
    import torch

    from kvloom.ops.torch_memory import read_device_memory

    assert read_device_memory(torch.device("cpu")) is None


@pytest.mark.gpu
def test_a_cuda_device_tells_its_memory() -> None:
    import torch

    from kvloom.ops.torch_memory import measure, read_device_memory

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    device = torch.device("cuda")
    before = read_device_memory(device)
    assert before is not None
    assert 0 < before.free_bytes < before.total_bytes
    with measure(device) as meter:
        held = meter.held_bytes
        meter.reset_peak()
        kept = torch.zeros(1 << 20, device=device)
        _ = kept + 1
        del _
        assert meter.held_bytes - held == 4 << 20
        assert meter.peak_bytes - held == 8 << 20
