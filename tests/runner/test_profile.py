"""The measured peak against a full run of every layer, traced from outside."""

from __future__ import annotations

import tracemalloc

import pytest

from eager_backends import make_backend
from kvloom.config import SchedulerConfig
from kvloom.dtypes import DType
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.planner import PlanRequest, get_kv_cache_configs
from kvloom.kv.spec import KVLimits
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.backend import MemoryMeter
from kvloom.ops.base import Ops
from kvloom.ops.reference import ReferenceBackend
from kvloom.request import Request
from kvloom.runner import profile
from kvloom.runner.model_runner import ModelRunner
from kvloom.runner.profile import (
    LoneRank,
    count_least_activation_bytes,
    measure_peak_activation_bytes,
)
from kvloom.sched.scheduler import Scheduler
from kvloom.weights.loader import load_weights
from tiny_mixtures import MIXTURE_CASES


def build_loaded(fakes, rank, **changes):
    config = {**fakes.llama, **changes}
    dtypes = ModelDTypes(DType.FLOAT32, DType.FLOAT32)
    model = build_model(config, rank, dtypes)
    load_weights(model, fakes.checkpoint(config), make_backend().pack)
    return model


class RunEverything:
    """In place of the rehearsal: every operation of every layer, traced as a whole."""

    def __init__(self, ops: Ops, meter: MemoryMeter) -> None:
        meter.reset_peak()
        self._ops = ops
        self._meter = meter

    def __getattr__(self, name):
        return getattr(self._ops, name)

    @property
    def peak_bytes(self):
        return self._meter.peak_bytes


# Which operation holds the peak: the MLP of many tokens, the logits, the longest context.
SIZES = [
    {"max_num_batched_tokens": 2048, "max_num_seqs": 2, "max_model_len": 64},
    {"max_num_batched_tokens": 300, "max_num_seqs": 300, "max_model_len": 16},
    {"max_num_batched_tokens": 300, "max_num_seqs": 1, "max_model_len": 20_000},
]


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rehearsed_peak_is_that_of_a_full_run(fakes, monkeypatch, sizes, world_size):
    rank = TensorParallelRank(world_size - 1, world_size)
    model = build_loaded(fakes, rank, num_hidden_layers=4, vocab_size=500)
    arguments = (model, make_backend(), LoneRank(rank.rank, world_size), fakes.limits(**sizes))
    rehearsed = measure_peak_activation_bytes(*arguments)
    monkeypatch.setattr(profile, "_Rehearsal", RunEverything)
    full = measure_peak_activation_bytes(*arguments)
    # A rehearsed operation's arguments live until it returns, even if it is done with them.
    assert rehearsed == pytest.approx(full, rel=0.06, abs=20_000)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", ["llama4", "deepseek_v3"])
def test_layers_with_experts_are_rehearsed(fakes, monkeypatch, case, sizes):
    """Their operations take stacks of weights and lists of values.

    All tokens of the rehearsal choose the same experts, which takes the most memory; further
    layers of the full run have them spread.
    """
    model = build_loaded(fakes, TensorParallelRank(), **MIXTURE_CASES[case])
    arguments = (model, make_backend(), LoneRank(0, 1), fakes.limits(**sizes))
    rehearsed = measure_peak_activation_bytes(*arguments)
    monkeypatch.setattr(profile, "_Rehearsal", RunEverything)
    full = measure_peak_activation_bytes(*arguments)
    assert full - 20_000 < rehearsed < 1.5 * full


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_least_is_not_above_the_peak(fakes, sizes, world_size):
    """Refusing below it refuses nothing that would have run."""
    rank = TensorParallelRank(0, world_size)
    model = build_loaded(fakes, rank, vocab_size=500)
    lone, limits = LoneRank(0, world_size), fakes.limits(**sizes)
    least = count_least_activation_bytes(model, lone, limits)
    assert 0 < least <= measure_peak_activation_bytes(model, ReferenceBackend(), lone, limits)


def test_a_part_of_a_large_step_is_rehearsed_and_never_says_too_little(fakes, monkeypatch):
    model = build_loaded(fakes, TensorParallelRank(), vocab_size=5000)
    sizes = fakes.limits(max_num_batched_tokens=1000, max_num_seqs=1000, max_model_len=16)
    arguments = (model, ReferenceBackend(), LoneRank(0, 1), sizes)
    whole = measure_peak_activation_bytes(*arguments)
    monkeypatch.setattr(profile, "_MAX_REHEARSED_TOKENS", 250)
    batches = []
    monkeypatch.setattr(
        model, "forward", lambda ops, b, f=model.forward: batches.append(b) or f(ops, b)
    )
    assert 0.98 * whole <= measure_peak_activation_bytes(*arguments) <= 1.2 * whole
    assert [(len(b.token_ids), len(b.logits_rows)) for b in batches] == [(250, 250)]


def test_each_shape_is_computed_once(fakes):
    model = build_loaded(fakes, TensorParallelRank(), num_hidden_layers=4)
    backend = ReferenceBackend()
    calls = []
    make_ops = backend.ops

    def counting_ops(batch, communicator):
        ops = make_ops(batch, communicator)
        attention = ops.attention
        ops.attention = lambda *args: calls.append(args) or attention(*args)
        return ops

    backend.ops = counting_ops
    measure_peak_activation_bytes(model, backend, LoneRank(0, 1), fakes.limits())
    assert len(calls) == 1


def test_measuring_leaves_no_trace(fakes):
    model = build_loaded(fakes, TensorParallelRank())
    measure_peak_activation_bytes(model, ReferenceBackend(), LoneRank(0, 1), fakes.limits())
    assert all(layer.storage is None and layer.spec is None for layer in model.attention_layers)
    assert not tracemalloc.is_tracing()


def test_a_tracer_that_runs_already_keeps_running(fakes):
    model = build_loaded(fakes, TensorParallelRank())
    tracemalloc.start()
    try:
        measure_peak_activation_bytes(model, ReferenceBackend(), LoneRank(0, 1), fakes.limits())
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_the_peak_covers_a_step_that_scores_a_prompt(fakes):
    """The scheduler cuts its chunk, so that its rows of logits are among those measured."""
    vocab_size, num_tokens = 5000, 2048
    model = build_loaded(fakes, TensorParallelRank(), vocab_size=vocab_size)
    limits = fakes.limits(max_num_batched_tokens=num_tokens, max_num_seqs=3, max_model_len=2100)
    runner = ModelRunner(model, ReferenceBackend(), LoneRank(0, 1), limits)
    counted_bytes = runner.profile_run()
    assert counted_bytes < num_tokens * vocab_size * 4  # it is no row of logits for every token

    request = PlanRequest(2100, 2100, num_tokens, num_blocks=2000)
    [config] = get_kv_cache_configs(request, [runner.get_kv_cache_spec()], [1 << 30])
    runner.initialize_kv_cache(config)
    manager = KVCacheManager(config, KVLimits(2100, num_tokens), has_prefix_cache=True)
    scheduler = Scheduler(SchedulerConfig(3, num_tokens), manager, 2100)
    params = fakes.params(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    for name in "abc":
        prompt = [len(name) + i % 60 for i in range(num_tokens)]
        scheduler.add_request(Request(name, prompt, params))
    peaks, num_scores = [], 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        tracemalloc.start()
        result = runner.sample_tokens(runner.execute_model(output))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        num_scores += sum(map(len, result.prompt_logprobs.values()))
        scheduler.update(output, result)
    assert num_scores == 3 * (num_tokens - 1)
    assert max(peaks) <= counted_bytes


@pytest.mark.torch
def test_the_peak_covers_every_request_at_its_longest(fakes):
    """Joined requests: keys and values of all of them are gathered at once."""
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 2000}
    model = build_loaded(fakes, TensorParallelRank(), **changes)
    backend = make_backend("torch")
    load_weights(model, fakes.checkpoint({**fakes.llama, **changes}), backend.pack)
    few, many = (
        measure_peak_activation_bytes(
            model,
            backend,
            LoneRank(0, 1),
            fakes.limits(max_num_batched_tokens=32, max_num_seqs=count, max_model_len=2000),
        )
        for count in (1, 32)
    )
    kv_heads = fakes.llama["num_key_value_heads"]
    head_size = fakes.llama["hidden_size"] // fakes.llama["num_attention_heads"]
    gathered_bytes = 2 * 32 * 2000 * kv_heads * head_size * 4
    assert few < gathered_bytes < many
