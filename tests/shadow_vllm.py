"""vLLM's worker over the shadow cache: name it with `worker_cls`, in this process or another.

SHADOW_LAYERS names the layers of `shadow.MODELS`; what was counted goes to the file SHADOW_REPORT.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafting import Guesser
from kvloom.runner.input_batch import RunnerLimits
from kvloom.vllm_plugin.drafts import Drafter
from kvloom.vllm_plugin.worker import KvloomWorker
from shadow import MAX_MODEL_LEN, MODELS, VOCAB_SIZE, ShadowWorker, expected_text


class ShadowVllmWorker(KvloomWorker):
    """Our worker in all but what computes."""

    def make_worker(self) -> Any:
        steps = self.scheduler_config
        limits = RunnerLimits(
            self.cache_config.block_size,
            MAX_MODEL_LEN,
            steps.max_num_seqs,
            steps.max_num_batched_tokens,
        )
        self.num_preempted = 0
        return ShadowWorker(MODELS[os.environ["SHADOW_LAYERS"]], limits)

    def make_drafter(self) -> Drafter | None:
        config = self.vllm_config.speculative_config
        if config is None:
            return None
        guesser = Guesser(0.3, 0, lambda prefix: expected_text(prefix, 1)[0], VOCAB_SIZE)
        return Drafter(guesser, config.num_speculative_tokens)

    def determine_available_memory(self, **_: Any) -> int:
        return int(self.cache_config.kv_cache_memory_bytes)

    def execute_model(self, scheduler_output: Any, **_: Any) -> Any:
        self.num_preempted += len(scheduler_output.preempted_req_ids or ())
        return super().execute_model(scheduler_output)

    def _finish(self, started: Any, grammar_output: Any | None) -> Any:
        result = super()._finish(started, grammar_output)
        report = asdict(self._worker.counts) | {"num_preempted": self.num_preempted}
        Path(os.environ["SHADOW_REPORT"]).write_text(json.dumps(report))
        return result
