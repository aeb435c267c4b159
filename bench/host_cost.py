"""What vLLM's scheduler costs per step, and what ours does: both in this process, in turn.

    PYTHONPATH=src PYTHON bench/host_cost.py [--rounds N]

PYTHON is of an environment that holds vLLM. Both schedule the same requests over the same groups of
layers with the prefix cache on, and are given a made-up token per request and step; what is timed
is `schedule` and `update`, outputs for workers and for the user included, the model left out. One
sample is the median of a batch's decode steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.config import SchedulerConfig
from kvloom.dtypes import DType
from kvloom.kv.manager import KVCacheManager
from kvloom.kv.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVLimits,
    SlidingWindowSpec,
)
from kvloom.request import Request, ResolvedSamplingParams
from kvloom.sched.scheduler import Scheduler
from kvloom.step import ModelRunnerOutput

BLOCK_SIZE = 16
NUM_BLOCKS = 40_000
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
WINDOW = 512
NUM_OUTPUT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Case:
    """Requests at once, and the cache they run over.

    Attributes:
        num_window_groups: beside one group of full attention.
        bar: the most of vLLM's time that ours may take.
    """

    num_requests: int
    num_prompt_tokens: int
    num_window_groups: int
    bar: float

    @property
    def name(self) -> str:
        """As the report calls it."""
        num_groups = 1 + self.num_window_groups
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        return f"{self.num_requests} at once, {groups}"

    def prompts(self, number: int) -> list[list[int]]:
        """Different ones per batch, so that nothing is cached."""
        n = self.num_prompt_tokens
        first = number * self.num_requests
        return [[(first + i) * n + j for j in range(n)] for i in range(self.num_requests)]


CASES = (
    Case(1, 256, 0, 0.8),
    Case(32, 256, 0, 0.6),
    Case(256, 256, 0, 0.6),
    Case(32, 1000, 5, 0.6),
)

Step = Callable[[], tuple[float, int]]
"""Runs one step; its seconds, and the tokens that the users got."""


class Ours:
    """kvloom's scheduler and cache manager."""

    def __init__(self, case: Case) -> None:
        common: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 1,
            "head_size": 16,
            "dtype": DType.BFLOAT16,
        }
        specs: list[KVCacheSpec] = [FullAttentionSpec(**common)]
        specs += [SlidingWindowSpec(**common, sliding_window=WINDOW)] * case.num_window_groups
        groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
        manager = KVCacheManager(
            KVCacheConfig(NUM_BLOCKS, [], groups),
            KVLimits(MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS),
            has_prefix_cache=True,
        )
        config = SchedulerConfig(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
        self._scheduler = Scheduler(config, manager, MAX_MODEL_LEN)
        self._num_known = 0

    def start(self, prompts: Sequence[list[int]]) -> Step:
        """Add a batch."""
        params = ResolvedSamplingParams(
            seed=0, max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
        )
        missing = {}
        for prompt in prompts:
            self._num_known += 1
            self._scheduler.add_request(Request(str(self._num_known), prompt, params))
            missing[str(self._num_known)] = len(prompt)
        return lambda: self._step(missing)

    def _step(self, missing: dict[str, int]) -> tuple[float, int]:
        start = time.perf_counter()
        output = self._scheduler.schedule()
        scheduled = time.perf_counter()
        result = ModelRunnerOutput(sampled_token_ids=_sampled(missing, output.num_scheduled_tokens))
        begin = time.perf_counter()
        events = self._scheduler.update(output, result)
        seconds = time.perf_counter() - begin + scheduled - start
        return seconds, sum(len(event.new_token_ids) for event in events)


class Theirs:
    """vLLM's scheduler and cache manager."""

    def __init__(self, case: Case, vllm_config: Any) -> None:
        import torch
        from vllm.v1 import kv_cache_interface as kv
        from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
        from vllm.v1.structured_output import StructuredOutputManager

        common = {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 1,
            "head_size": 16,
            "dtype": torch.bfloat16,
        }
        specs = [kv.FullAttentionSpec(**common)]
        specs += [
            kv.SlidingWindowSpec(**common, sliding_window=WINDOW)
            for _ in range(case.num_window_groups)
        ]
        groups = [kv.KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
        vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
        self._scheduler = VllmScheduler(
            vllm_config=vllm_config,
            kv_cache_config=kv.KVCacheConfig(
                num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups
            ),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_SIZE,
        )
        self._num_known = 0

    def start(self, prompts: Sequence[list[int]]) -> Step:
        """Add a batch."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request as VllmRequest

        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        missing = {}
        for prompt in prompts:
            self._num_known += 1
            req_id = str(self._num_known)
            request = VllmRequest(req_id, prompt, params, None, block_hasher=hasher)
            self._scheduler.add_request(request)
            missing[req_id] = len(prompt)
        return lambda: self._step(missing)

    def _step(self, missing: dict[str, int]) -> tuple[float, int]:
        from vllm.v1.outputs import ModelRunnerOutput as VllmOutput

        start = time.perf_counter()
        output = self._scheduler.schedule()
        scheduled = time.perf_counter()
        sampled = _sampled(missing, output.num_scheduled_tokens)
        req_ids = list(output.num_scheduled_tokens)
        result = VllmOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[sampled.get(req_id, []) for req_id in req_ids],
        )
        begin = time.perf_counter()
        outputs = self._scheduler.update_from_output(output, result)
        seconds = time.perf_counter() - begin + scheduled - start
        return seconds, sum(len(o.new_token_ids) for c in outputs.values() for o in c.outputs)


def _sampled(missing: dict[str, int], scheduled: dict[str, int]) -> dict[str, list[int]]:
    """A token for each request whose known tokens are all computed; `missing` is kept."""
    for req_id, num_tokens in scheduled.items():
        missing[req_id] -= num_tokens
    sampled = {req_id: [7] for req_id in scheduled if missing[req_id] == 0}
    for req_id in sampled:
        missing[req_id] = 1
    return sampled


def make_vllm_config() -> Any:
    """Of a small llama; the scheduler reads no more of it than its lengths."""
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm.config import CacheConfig, ModelConfig, VllmConfig
    from vllm.config import SchedulerConfig as VllmSchedulerConfig

    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 1000,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            scheduler_config=VllmSchedulerConfig(
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )


def decode_us(side: Ours | Theirs, prompts: Sequence[list[int]]) -> float:
    """Microseconds of a decode step of one batch, the median over its steps."""
    step = side.start(prompts)
    seconds, num_tokens = [], 0
    while num_tokens < len(prompts) * NUM_OUTPUT_TOKENS:
        taken, num_new = step()
        num_tokens += num_new
        if num_new == len(prompts):
            seconds.append(taken)
    step()  # tells workers of those that ended
    return statistics.median(seconds[1:]) * 1e6


def row(case: Case, samples: Sequence[tuple[float, float]]) -> str:
    """One row of the table: ours, vLLM's, and the median of the ratios."""
    ours, theirs = (statistics.median(side) for side in zip(*samples, strict=True))
    share = statistics.median(a / b for a, b in samples)
    verdict = "pass" if share <= case.bar else "MISSED"
    return (
        f"| {case.name} | {ours:,.0f} | {theirs:,.0f} | {share:.0%} | {case.bar:.0%}: {verdict} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    num_rounds = parser.parse_args().rounds
    vllm_config = make_vllm_config()
    print("| requests | kvloom, us a step | vLLM, us a step | share | bar |")
    print("|---|---|---|---|---|", flush=True)
    for case in CASES:
        sides = (Ours(case), Theirs(case, vllm_config))
        gc.collect()
        gc.freeze()
        samples = []
        for number in range(num_rounds):
            prompts = case.prompts(number)
            samples.append((decode_us(sides[0], prompts), decode_us(sides[1], prompts)))
        print(row(case, samples), flush=True)


if __name__ == "__main__":
    main()
