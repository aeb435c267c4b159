"""Fakes of the runner's tests: a model that reads its whole prefix through the paged cache."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.kv.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVSpec,
    LayerSpec,
)
from kvloom.models.base import ModelDTypes
from kvloom.models.parallel import TensorParallelRank
from kvloom.models.registry import build_model
from kvloom.ops.base import KVLayer
from kvloom.ops.reference import EagerExecutable
from kvloom.request import ResolvedSamplingParams
from kvloom.runner.collectives import SingleRankCommunicator
from kvloom.runner.input_batch import RunnerLimits
from kvloom.runner.model_runner import ModelRunner
from kvloom.step import CachedRequestData, NewRequestData, SchedulerOutput

VOCAB_SIZE = 101

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


class FakeBackend:
    """KV memory is a table of (token id, position) per slot; -1 where nothing was written."""

    name = "fake"
    pack_rows = None

    def __init__(self):
        self.copies = []

    def allocate_kv(self, size_bytes):
        return {"size_bytes": size_bytes}

    def view_kv(self, raw, spec, num_blocks, offset_bytes=0):
        view = np.full((num_blocks, spec.block_size, 2), -1, np.int64)
        raw.setdefault("views", []).append(view)
        raw.setdefault("offsets", []).append(offset_bytes)
        return view

    def copy_blocks(self, storage, copies):
        self.copies.append((storage, copies))
        for source, destination in copies:
            storage[destination] = storage[source]

    def compile(self, model, communicator, sizes):
        return EagerExecutable(model, lambda batch: None)

    def to_host(self, value):
        return value


class PrefixModel:
    """The next token is a hash of all tokens before it, as its layers read them from the cache."""

    max_model_len = 300
    vocab_size = VOCAB_SIZE

    def __init__(self, layers=("a",), shared=None):
        shared = shared or {}
        self.parameters = []
        self.attention_layers = [KVLayer(name) for name in layers]
        self._spec = KVSpec(
            [
                LayerSpec(name, 1, 8, DType.FLOAT32, shares_kv_with=shared.get(name))
                for name in layers
            ]
        )
        self.batches = []
        self.nan_token = None  # a last token whose logits are NaN

    def get_kv_spec(self):
        return self._spec

    def forward(self, ops, batch):
        self.batches.append(batch)
        for layer in self.attention_layers:
            slots = batch.attention[layer.group].slot_mapping
            cells = layer.storage.reshape(-1, 2)
            written = slots >= 0
            cells[slots[written], 0] = batch.token_ids[written]
            cells[slots[written], 1] = batch.positions[written]
        logits = np.zeros((len(batch.logits_rows), VOCAB_SIZE), np.float32)
        for row, token in enumerate(batch.logits_rows):
            prefixes = [self._prefix(layer, batch, token) for layer in self.attention_layers]
            assert all(prefix == prefixes[0] for prefix in prefixes)
            logits[row, next_token(prefixes[0])] = 9.0
            if prefixes[0][-1] == self.nan_token:
                logits[row] = np.nan
        return logits

    def _prefix(self, layer, batch, token):
        """Tokens 0..position of the request that `token` belongs to, read through its table."""
        meta = batch.attention[layer.group]
        request = int(np.searchsorted(meta.query_start, token, side="right")) - 1
        position = meta.num_computed_tokens[request] + token - meta.query_start[request]
        assert position == batch.positions[token]
        assert position < meta.seq_lens[request]
        table = meta.block_table[request]
        cells = layer.storage[table[: position // meta.block_size + 1]].reshape(-1, 2)
        cells = cells[: position + 1]
        assert cells[:, 1].tolist() == list(range(position + 1)), "read a slot nobody wrote so"
        return cells[:, 0].tolist()


def next_token(prefix):
    return zlib.crc32(repr([int(t) for t in prefix]).encode()) % VOCAB_SIZE


def continue_text(prompt, num_tokens):
    """What an undisturbed PrefixModel generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def make_params(**fields):
    return ResolvedSamplingParams(**{"seed": 0, "max_tokens": 16, "temperature": 0.0, **fields})


def new_request(req_id, prompt, block_ids, num_computed=0, **fields):
    return NewRequestData(req_id, prompt, [], make_params(**fields), block_ids, num_computed)


def make_step(new=(), cached=(), scheduled=None, finished=(), copies=(), drafts=None):
    """A SchedulerOutput; `cached` holds (id, resumed, tokens, blocks, computed)."""
    columns = [list(c) for c in zip(*cached, strict=True)] or [[], [], [], [], []]
    return SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(*columns),
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
        structured_output_request_ids={},
        grammar_bitmask=None,
        kv_connector_metadata=None,
        block_copies=list(copies),
    )


def make_kv_config(groups, num_blocks=40, is_overlaid=False):
    """Full-attention groups [(block_size, [layer names])] on a tensor each, or all on one."""
    groups = [
        KVCacheGroupSpec(
            list(names),
            FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=DType.FLOAT32),
        )
        for size, names in groups
    ]
    tensors = [
        KVCacheTensor(g.kv_cache_spec.page_size_bytes * num_blocks, list(g.layer_names))
        for g in groups
    ]
    if is_overlaid:
        names = [name for tensor in tensors for name in tensor.shared_by]
        tensors = [KVCacheTensor(tensors[0].size, names)]
    return KVCacheConfig(num_blocks, tensors, groups)


class InMemoryCheckpoint:
    """A Hugging Face checkpoint of random weights for a config."""

    metadata = None
    eos_token_ids = frozenset()
    path = None

    def __init__(self, config, seed=0):
        self.config = config
        self.num_reads = 0
        dtypes = ModelDTypes(DType.FLOAT32, DType.FLOAT32)
        model = build_model(config, TensorParallelRank(0, 1), dtypes)
        rng = np.random.default_rng(seed)
        self.tensors = {
            source.name: rng.standard_normal(source.shape).astype(np.float32) * np.float32(0.3)
            for parameter in model.parameters
            for source in parameter.sources
        }

    @property
    def tensor_names(self):
        return frozenset(self.tensors)

    def read(self, name):
        self.num_reads += 1
        return self.tensors[name]

    def stored_format(self, name):
        return "F32"


class Fakes:
    """What the tests of this folder share."""

    backend = FakeBackend
    checkpoint = InMemoryCheckpoint
    continue_text = staticmethod(continue_text)
    kv_config = staticmethod(make_kv_config)
    llama = TINY_LLAMA
    model = PrefixModel
    new_request = staticmethod(new_request)
    next_token = staticmethod(next_token)
    params = staticmethod(make_params)
    step = staticmethod(make_step)
    vocab_size = VOCAB_SIZE

    @staticmethod
    def limits(**sizes):
        defaults = {
            "block_size": 4,
            "max_model_len": 300,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
        }
        return RunnerLimits(**{**defaults, **sizes})

    @staticmethod
    def runner(kv_config, model=None, backend=None, sampler=None, **sizes):
        """A runner on a PrefixModel whose KV cache is initialised."""
        model, backend = model or PrefixModel(), backend or FakeBackend()
        limits = Fakes.limits(**sizes)
        runner = ModelRunner(model, backend, SingleRankCommunicator(), limits, sampler)
        runner.initialize_kv_cache(kv_config)
        return runner


@pytest.fixture(scope="session")
def fakes():
    return Fakes
