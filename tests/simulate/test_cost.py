"""How long a step takes: the roofline by hand, and what a profile says between its points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloom.errors import ConfigError
from kvloom.simulate.cost import Efficiency, RooflineCost
from kvloom.simulate.devices import DEVICES, Device, find_device
from kvloom.simulate.profile import Profile, interpolate, read_profile
from kvloom.simulate.work import AttentionWork, ModelWork, StepShape, Visibility

DEVICE = Device("x", "X", 10**9, 1000.0, 10_000.0, 100.0, "made up")
WORK = ModelWork(
    flops_per_token=400,
    flops_per_row=200,
    weight_bytes=5000,
    experts=(),
    attention=(AttentionWork(Visibility(), flops_per_pair=8, bytes_per_key=16.0),),
    num_collectives=3,
    collective_bytes_per_token=60,
    collective_bytes_per_row=20,
)
PEAK = Efficiency(compute=1, memory=1, link=1, step_seconds=0.25, collective_seconds=0.5)


def seconds(cost, *chunks, num_rows=0, is_after_idle=False):
    return cost.step_seconds(StepShape(list(chunks), num_rows, is_after_idle))


def test_few_tokens_wait_for_the_weights():
    """5 s for 5,000 B of weights, 0.04 s of arithmetic; 4 keys of 16 B, 8 operations each."""
    cost = RooflineCost(replace(WORK, num_collectives=0), DEVICE, 1, PEAK)
    assert seconds(cost, (3, 1)) == pytest.approx(0.25 + 5.0 + 4 * 16 / 1000)


def test_many_tokens_wait_for_the_arithmetic():
    cost = RooflineCost(replace(WORK, num_collectives=0), DEVICE, 1, PEAK)
    pairs = 200 * 201 // 2
    assert seconds(cost, (0, 200), num_rows=1) == pytest.approx(
        0.25 + (400 * 200 + 200) / 10_000 + pairs * 8 / 10_000
    )


def test_ranks_exchange_what_a_ring_does():
    """Sums move 2 x 3/4 of the bytes over each link, gathering 3/4; each starts with 0.5 s."""
    cost = RooflineCost(WORK, DEVICE, 4, PEAK)
    alone = RooflineCost(replace(WORK, num_collectives=0), DEVICE, 4, PEAK)
    extra = seconds(cost, (0, 10), num_rows=2) - seconds(alone, (0, 10), num_rows=2)
    assert extra == pytest.approx(3 * 0.5 + (1.5 * 60 * 10 + 0.75 * 20 * 2) / 100)


def test_shares_of_the_peak_slow_their_part():
    slow = replace(PEAK, memory=0.5)
    fast, slower = (RooflineCost(WORK, DEVICE, 1, e) for e in (PEAK, slow))
    assert seconds(slower, (3, 1)) - seconds(fast, (3, 1)) == pytest.approx(5.0 + 0.064)


def test_catalogue_has_what_the_readme_names():
    names = ["cpu", "a100", "h100", "h200", "b200", "mi300x", "trn2", "trn3", "tpu-v5e", "tpu-v6e"]
    assert list(DEVICES) == names
    for device in DEVICES.values():
        assert device.source
        # No device computes less than 50 or more than 1,000 operations per byte it reads.
        assert 50 < device.flops / device.bytes_per_second < 1000


def test_a_trainium_rank_has_a_quarter_of_the_chip():
    trn2 = find_device("trn2")
    assert trn2.memory_bytes == 24 << 30
    assert trn2.bytes_per_second * 4 == pytest.approx(2.9e12)
    assert trn2.flops * 4 == pytest.approx(667e12)


def test_unknown_devices_are_refused_with_the_list():
    with pytest.raises(ConfigError, match="h100, h200"):
        find_device("h1000")


PROFILE = Profile(
    model="m",
    machine="here",
    tensor_parallel_size=1,
    chunk_seconds=((1, 1.0), (4, 1.6), (100, 12.0)),
    decode_seconds=((1, 1.1), (4, 3.2)),
    decode_num_computed=20,
    decode_seconds_per_byte=0.001,
    chunk_seconds_per_flop=0.0005,
    idle_seconds=((2, 0.5), (6, 0.75)),
)


def test_times_between_measured_ones_lie_on_lines():
    assert interpolate(PROFILE.chunk_seconds, 1) == 1.0
    assert interpolate(PROFILE.chunk_seconds, 3) == pytest.approx(1.4)
    assert interpolate(PROFILE.chunk_seconds, 200) == pytest.approx(24.0)


def test_what_was_measured_comes_out_again():
    cost = PROFILE.cost(WORK, 1)
    for num_tokens, measured in PROFILE.chunk_seconds[1:]:
        assert seconds(cost, (0, num_tokens)) == pytest.approx(measured)
    for num_requests, measured in PROFILE.decode_seconds:
        assert seconds(cost, *[(20, 1)] * num_requests) == pytest.approx(measured)


def test_context_costs_what_it_was_measured_to():
    cost = PROFILE.cost(WORK, 1)
    longer = seconds(cost, (99, 1)) - seconds(cost, (49, 1))
    assert longer == pytest.approx(50 * 16 * 0.001)
    later = seconds(cost, (1000, 4)) - seconds(cost, (0, 4))
    assert later == pytest.approx(4000 * 8 * 0.0005)


def test_context_adds_to_the_tokens_of_many_requests():
    cost = PROFILE.cost(WORK, 1)
    longer = seconds(cost, *[(70, 1)] * 4)
    assert longer == pytest.approx(3.2 + 4 * 50 * 16 * 0.001)


def test_prompts_beside_tokens_cost_what_both_were_measured_to():
    """Seven tokens lie at 3/96 of the way from 4 to 100; all keys and pairs come on top.

    Without attention, 4 requests cost 3.2 - 4 x 21 keys of 16 B, and 4 tokens of one 1.6 - 10 pairs
    of 8 operations.
    """
    cost = PROFILE.cost(WORK, 1)
    many = (3.2 - 4 * 21 * 16 * 0.001) - (1.6 - 10 * 8 * 0.0005)
    together = (1.6 + 3 / 96 * 10.4) - 28 * 8 * 0.0005 + many
    attention = 3 * 31 * 16 * 0.001 + 10 * 8 * 0.0005
    assert seconds(cost, (0, 4), *[(30, 1)] * 3) == pytest.approx(together + attention)


def test_a_pause_costs_the_step_after_it_what_it_was_measured_to():
    """By its tokens; before the first point and behind the last what these took."""
    cost = PROFILE.cost(WORK, 1)
    steps = {0.5: [(30, 1)], 0.625: [(20, 1)] * 4, 0.75: [(0, 90)]}
    for more, chunks in steps.items():
        busy, paused = (seconds(cost, *chunks, is_after_idle=idle) for idle in (False, True))
        assert paused - busy == pytest.approx(more)


def test_profiles_are_read_as_they_were_saved(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == PROFILE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "kvloom profile 2"}'])
def test_other_files_are_no_profiles(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match="--save-profile"):
        read_profile(tmp_path / "p.json")


def test_other_ranks_need_another_profile():
    with pytest.raises(ConfigError, match="tp 1, not 2"):
        PROFILE.cost(WORK, 2)
