"""Buckets: which are declared, which are kept, and which one holds a size."""

from __future__ import annotations

import pytest

from kvloom.config import EngineConfig
from kvloom.errors import CapacityError, ConfigError
from kvloom.shapes import ShapeBuckets, StepBounds, declare_buckets, find_bucket


def test_the_smallest_bucket_that_holds_a_size_is_taken():
    """NEURON.md section 6: of [1, 2, 4, 8], 3 takes 4 and 5 takes 8."""
    assert [find_bucket((1, 2, 4, 8), n, "requests") for n in (0, 1, 3, 4, 5, 8)] == [
        1,
        1,
        4,
        4,
        8,
        8,
    ]
    with pytest.raises(CapacityError, match="9 requests is larger than the largest bucket, 8"):
        find_bucket((1, 2, 4, 8), 9, "requests")


def test_a_cpu_declares_few_powers_of_two():
    buckets = declare_buckets("cpu", StepBounds(2048, 64, 8192))
    assert buckets == ShapeBuckets((8, 32, 128, 512, 2048), (8, 64), (1024, 8192), 2048)
    assert declare_buckets("cpu", StepBounds(8, 3, 100)) == ShapeBuckets((8,), (3,), (100,), 8)


@pytest.mark.parametrize("device", ["trn2", "trn3", "neuron"])
def test_trainium_declares_its_own(device):
    """NEURON.md section 7: token counts from 128 in powers of two, batch sizes from 1, segments.

    Steps of single tokens may be shorter: they have as many tokens as requests.
    """
    buckets = declare_buckets(device, StepBounds(4096, 32, 131_072))
    assert buckets.num_reqs == (1, 2, 4, 8, 16, 32)
    assert buckets.num_tokens == (1, 2, 4, 8, 16, 32, 128, 256, 512, 1024, 2048, 4096)
    assert buckets.context_lens == (2048, 16_384, 131_072)
    assert all(length % 128 == 0 for length in buckets.context_lens)
    assert buckets.prefill_segment == 4096
    many = declare_buckets(device, StepBounds(300, 256, 4096))
    assert many.num_tokens == (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)
    assert many.prefill_segment == 300
    assert declare_buckets(device, StepBounds(3000, 256, 4096)).prefill_segment == 2048


def test_a_dynamic_engine_pads_nothing():
    config = EngineConfig.from_options({})
    assert config.resolve_buckets(100) is None
    assert config.scheduler.max_num_tokens_per_req == config.scheduler.max_num_batched_tokens


def test_budgets_are_cut_to_the_largest_buckets():
    options = {
        "has_static_shapes": True,
        "num_batched_tokens_buckets": [16, 100],
        "num_seqs_buckets": (1, 5),
        "context_len_buckets": (64, 128),
    }
    config = EngineConfig.from_options(options)
    steps = config.scheduler
    assert (steps.max_num_batched_tokens, steps.max_num_seqs) == (100, 5)
    assert steps.max_num_tokens_per_req == 100
    assert config.resolve_buckets(8192) == ShapeBuckets((16, 100), (1, 5), (64, 128), 100)


def test_buckets_that_no_step_needs_are_left_out():
    """A budget of 20 tokens needs 32, and of 8 requests 8; a length of 50 needs 64."""
    options = {
        "max_num_batched_tokens": 20,
        "max_num_seqs": 8,
        "prefill_segment": 10,
        "num_batched_tokens_buckets": (16, 32, 64),
        "num_seqs_buckets": (4, 8, 16),
        "context_len_buckets": (64, 128),
    }
    config = EngineConfig.from_options(options)
    assert config.scheduler.max_num_batched_tokens == 20
    assert config.resolve_buckets(50) == ShapeBuckets((16, 32), (4, 8), (64,), 10)


def test_a_segment_bounds_one_request_without_static_shapes():
    config = EngineConfig.from_options({"prefill_segment": 7})
    assert config.scheduler.max_num_tokens_per_req == 7
    assert config.resolve_buckets(50) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_seqs_buckets": ()}, "num_seqs_buckets is .* ascend"),
        ({"num_seqs_buckets": (0, 1)}, "num_seqs_buckets is .* ascend"),
        ({"num_batched_tokens_buckets": (8, 8)}, "num_batched_tokens_buckets is .* ascend"),
        ({"context_len_buckets": (8, 4)}, "context_len_buckets is .* ascend"),
        ({"context_len_buckets": (8, 4.0)}, 'a tuple of integers or "auto"'),
        ({"context_len_buckets": 8}, 'a tuple of integers or "auto"'),
        ({"has_static_shapes": False, "num_seqs_buckets": (4,)}, "leave out one of both"),
        ({"max_model_len": 100, "context_len_buckets": (64,)}, "add 100 to them"),
        ({"prefill_segment": 0}, "give at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(options)
