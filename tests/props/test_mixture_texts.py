"""Texts of tiny random models whose layers differ at random, from plan to token, against no cache.

Planner, manager, scheduler and runner are the real ones, the pool is tight, and requests share
beginnings. Each text must be what a few lines of numpy make of the definitions, without any cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvloom.config import SchedulerConfig
from kvloom.dtypes import DType
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.planner import KVCachePlan, PlanRequest, make_kv_cache_specs, plan_kv_cache
from kvloom.kv.spec import KVLimits, KVSpec, LayerSpec
from kvloom.ops.base import Attention, KVLayer, Parameter
from kvloom.ops.reference import ReferenceBackend
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.runner.collectives import SingleRankCommunicator
from kvloom.runner.input_batch import RunnerLimits
from kvloom.runner.model_runner import ModelRunner
from kvloom.sched.scheduler import Scheduler
from visibility import Kind

VOCAB_SIZE, HIDDEN_SIZE, NUM_HEADS, MAX_MODEL_LEN = 40, 16, 4, 48
NUM_MODELS = 8
MAX_ROUNDING = 0.02  # of logits, whose spread is 16


@dataclass
class Layer:
    spec: LayerSpec
    kind: Kind
    weights: dict[str, np.ndarray]  # [out, in]

    @property
    def scale(self) -> float:
        return self.spec.head_size**-0.5


def make_layers(rng: random.Random, weights: np.random.Generator) -> list[Layer]:
    """Seven to nine layers of up to three sorts; some read the KV of an earlier one."""
    layers: list[Layer] = []
    kinds = [("full", 0), ("window", 3), ("window", 9), ("chunk", 6)]
    sorts = [(*rng.choice(kinds), rng.choice([1, 2]), rng.choice([4, 8])) for _ in range(3)]
    for index in range(rng.randint(7, 9)):
        name, size, num_kv_heads, head_size = rng.choice(sorts)
        spec = LayerSpec(
            f"layers.{index}",
            num_kv_heads,
            head_size,
            DType.FLOAT32,
            sliding_window_size=size if name == "window" else None,
            chunk_size=size if name == "chunk" else None,
        )
        kind = Kind(name, 1, size)
        owners = [layer for layer in layers if layer.spec.shares_kv_with is None]
        if owners and rng.random() < 0.2:
            target = rng.choice(owners)
            spec = replace(target.spec, name=spec.name, shares_kv_with=target.spec.name)
            kind = target.kind
        shapes = {
            "q": (NUM_HEADS * spec.head_size, HIDDEN_SIZE),
            "k": (spec.num_kv_heads * spec.head_size, HIDDEN_SIZE),
            "v": (spec.num_kv_heads * spec.head_size, HIDDEN_SIZE),
            "out": (HIDDEN_SIZE, NUM_HEADS * spec.head_size),
        }
        # Half the size for queries and keys: larger scores would make nine layers magnify rounding
        # until, now and then, single and double precision disagree on the token.
        sizes = {"q": 0.5, "k": 0.5, "v": 1.0, "out": 1.0}
        arrays = {
            n: (sizes[n] * weights.standard_normal(shape)).astype(np.float32)
            for n, shape in shapes.items()
        }
        layers.append(Layer(spec, kind, arrays))
    return layers


class MixtureModel:
    """Attention layers with residuals over the operations, and nothing else."""

    max_model_len, vocab_size = MAX_MODEL_LEN, VOCAB_SIZE

    def __init__(self, layers: list[Layer], table: np.ndarray) -> None:
        self.layers, self.table = layers, table
        self._table = parameter("table", table)
        self._weights = [
            {name: parameter(name, array) for name, array in layer.weights.items()}
            for layer in layers
        ]
        self.attention_layers = [KVLayer(layer.spec.name) for layer in layers]

    def get_kv_spec(self) -> KVSpec:
        return KVSpec([layer.spec for layer in self.layers])

    def forward(self, ops, batch):
        x = ops.embedding(batch.token_ids, self._table)
        for layer, kv, w in zip(self.layers, self.attention_layers, self._weights, strict=True):
            q = ops.heads(ops.linear(x, w["q"]), NUM_HEADS)
            attention = Attention(layer.scale)
            if layer.spec.shares_kv_with is None:
                k, v = (ops.heads(ops.linear(x, w[n]), layer.spec.num_kv_heads) for n in "kv")
                a = ops.attention(kv, q, k, v, attention)
            else:
                a = ops.shared_attention(kv, q, attention)
            x = ops.rms_norm(ops.add(x, ops.linear(a, w["out"])), None, 1e-6)
        return ops.linear(ops.select_rows(x, batch.logits_rows), self._table)


def parameter(name: str, array: np.ndarray) -> Parameter:
    return Parameter(name, array.shape, DType.FLOAT32, (), value=array)


def next_logits(model: MixtureModel, token_ids: list[int], dtype: type) -> np.ndarray:
    """The same model from the definitions: everything at once, no cache."""
    x = model.table[token_ids].astype(dtype)  # [num_tokens, hidden_size]
    num_tokens = len(token_ids)
    stored: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for layer in model.layers:
        spec, w = layer.spec, layer.weights
        q = (x @ w["q"].T).reshape(num_tokens, NUM_HEADS, -1)
        if spec.shares_kv_with is None:
            k, v = ((x @ w[n].T).reshape(num_tokens, spec.num_kv_heads, -1) for n in "kv")
            stored[spec.name] = (k, v)
        k, v = (
            a.repeat(NUM_HEADS // spec.num_kv_heads, axis=1)
            for a in stored[spec.shares_kv_with or spec.name]
        )
        sees = np.array(
            [[layer.kind.sees(i, j) for j in range(num_tokens)] for i in range(num_tokens)]
        )
        scores = np.where(sees, np.einsum("ihd,jhd->hij", q, k) * layer.scale, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        a = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
        x = x + a.reshape(num_tokens, -1) @ w["out"].T
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x[-1] @ model.table.T


def check_next(model: MixtureModel, token_ids: list[int], token_id: int) -> None:
    """The token has the best logit in double precision, or rounding to single hides which has."""
    logits = next_logits(model, token_ids, np.float64)
    missed = logits.max() - logits[token_id]
    if missed:
        rounding = np.abs(next_logits(model, token_ids, np.float32) - logits).max()
        assert missed <= 2 * min(rounding, MAX_ROUNDING), f"token {len(token_ids)}: {missed}"


def make_plan(rng: random.Random, model: MixtureModel, budget: int, base: int) -> KVCachePlan:
    """A pool for one to three requests of full length."""
    specs = make_kv_cache_specs(model.get_kv_spec(), base)
    request = PlanRequest(MAX_MODEL_LEN, MAX_MODEL_LEN, budget)
    roomy = plan_kv_cache(request, [specs], [1 << 24])
    num_blocks = 1 + roomy.num_reserved_blocks
    num_blocks += int(roomy.num_blocks_per_request * rng.uniform(1.0, 3.0))
    return plan_kv_cache(replace(request, num_blocks=num_blocks), [specs], [1 << 24])


def make_engine(rng: random.Random, model: MixtureModel):
    """Scheduler, manager and runner over a planned cache."""
    budget, base = rng.choice([3, 8, 64]), rng.choice([1, 2, 4])
    [config] = make_plan(rng, model, budget, base).configs
    manager = KVCacheManager(config, KVLimits(MAX_MODEL_LEN, budget), has_prefix_cache=True)
    scheduler = Scheduler(SchedulerConfig(6, budget), manager, MAX_MODEL_LEN)
    limits = RunnerLimits(base, MAX_MODEL_LEN, 6, budget)
    runner = ModelRunner(model, ReferenceBackend(), SingleRankCommunicator(), limits)
    runner.initialize_kv_cache(config)
    return scheduler, manager, runner


def make_model(seed: int) -> MixtureModel:
    weights = np.random.default_rng(seed)
    layers = make_layers(random.Random(seed), weights)
    return MixtureModel(layers, weights.standard_normal((VOCAB_SIZE, HIDDEN_SIZE), np.float32))


def test_models_are_laid_out_in_every_way():
    """Several groups on one tensor, several layers in one group, layers that share KV."""
    ways = set()
    for seed in range(NUM_MODELS):
        [config] = make_plan(random.Random(seed), make_model(seed), 8, 2).configs
        groups = config.kv_cache_groups
        ways.add(("groups", len(groups) > 1))
        ways.add(("several", any(len(group.layer_names) > 2 for group in groups)))
        ways.add(("one", any(len(group.layer_names) == 1 for group in groups)))
    assert {("groups", True), ("several", True), ("one", True)} <= ways


def run(seed: int, num_prompts: int) -> int:
    """Check the texts of prompts with one or three choices; returns how many tails were copied."""
    rng, model = random.Random(seed), make_model(seed)
    scheduler, manager, runner = make_engine(rng, model)
    stems = [rng.choices(range(VOCAB_SIZE), k=MAX_MODEL_LEN - 8) for _ in range(2)]
    requests: list[Request] = []
    num_left, num_copies = num_prompts, 0
    while num_left or scheduler.has_unfinished_requests():
        if num_left and rng.random() < 0.3:
            num_left -= 1
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(len(stem))] + rng.choices(range(VOCAB_SIZE), k=2)
            params = ResolvedSamplingParams(
                seed=0, temperature=0.0, max_tokens=rng.randint(1, MAX_MODEL_LEN - len(prompt))
            )
            choices = [
                Request(f"{num_left}.{choice}", prompt, params)
                for choice in range(rng.choice([1, 1, 3]))
            ]
            for request in choices:
                request.leader = None if request is choices[0] else choices[0]
                scheduler.add_request(request)
            requests += choices
        output = scheduler.schedule()
        num_copies += len(output.block_copies)
        manager.check()
        scheduler.update(output, runner.sample_tokens(runner.execute_model(output)))
        manager.check()
    for request in requests:
        assert request.num_output_tokens == request.sampling_params.max_tokens
        for end in range(request.num_prompt_tokens, request.num_tokens):
            check_next(model, request.token_ids[:end], request.token_ids[end])
    assert manager.stats.num_hit_tokens > 0
    assert manager.num_used_blocks == 0
    return num_copies


@pytest.mark.parametrize("seed", range(NUM_MODELS))
def test_texts_equal_those_without_a_cache(seed, scale):
    run(seed, 12 * scale)


def test_choices_copy_the_tail_of_their_prompt():
    """A tight pool gives fork points up, so that not every seed has copies: this one must."""
    assert run(1, 12) > 0
