"""One engine in a process of its own: peers_worker.py ENGINE MODEL OPTIONS (as JSON).

Runs in the engine's own environment, so it imports the standard library and that engine alone.
Commands come as lines of JSON and are answered by one line each:

    {"prompts": [...], "num_output_tokens": n}    times one batch of n tokens each, EOS ignored
    {"prompts": [...], "max_tokens": n}           answers with texts, which may end sooner
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Options = dict[str, Any]


class Engine(Protocol):
    """What the benchmark asks of an engine. Decoding is greedy."""

    def generate(self, prompts: Sequence[str], num_tokens: int, ignores_eos: bool) -> Any:
        """Texts in, texts out, as one batch: all that is timed. Returns the engine's own result."""

    def read(self, result: Any) -> tuple[list[str], int, int]:
        """Texts, prompt tokens and output tokens of a result."""


class Kvloom:
    """Our own engine; options are those of `LLM`."""

    def __init__(self, model: str, options: Options) -> None:
        from kvloom import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(model=model, has_prefix_cache=False, max_model_len=4096, **options)

    def generate(self, prompts: Sequence[str], num_tokens: int, ignores_eos: bool) -> Any:
        """`LLM.generate`."""
        params = self._params(temperature=0.0, max_tokens=num_tokens, ignore_eos=ignores_eos)
        return self._llm.generate(prompts, params, has_progress_bar=False)

    def read(self, result: Any) -> tuple[list[str], int, int]:
        """From `RequestOutput`s."""
        choices = [output.outputs[0] for output in result]
        num_prompt = sum(len(output.prompt_token_ids) for output in result)
        return [c.text for c in choices], num_prompt, sum(len(c.token_ids) for c in choices)


class Vllm:
    """VLLM's CPU build, with or without a platform plugin; options are those of its `LLM`."""

    def __init__(self, model: str, options: Options) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        fixed = {"max_model_len": 4096, "max_num_seqs": 64, "dtype": "bfloat16"}
        self._llm = LLM(model=model, enable_prefix_caching=False, **fixed, **options)

    def generate(self, prompts: Sequence[str], num_tokens: int, ignores_eos: bool) -> Any:
        """`LLM.generate`."""
        params = self._params(temperature=0.0, max_tokens=num_tokens, ignore_eos=ignores_eos)
        return self._llm.generate(list(prompts), params, use_tqdm=False)

    def read(self, result: Any) -> tuple[list[str], int, int]:
        """From vLLM's `RequestOutput`s, which ours are like."""
        choices = [output.outputs[0] for output in result]
        num_prompt = sum(len(output.prompt_token_ids) for output in result)
        return [c.text for c in choices], num_prompt, sum(len(c.token_ids) for c in choices)


class Openvino:
    """OpenVINO GenAI's continuous batching over the GGUF file; options are device properties."""

    def __init__(self, model: str, options: Options) -> None:
        import openvino_genai as genai

        self._genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        self._pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def generate(self, prompts: Sequence[str], num_tokens: int, ignores_eos: bool) -> Any:
        """`ContinuousBatchingPipeline.generate` over plain texts."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.min_new_tokens = num_tokens if ignores_eos else 0
        config.ignore_eos = ignores_eos
        config.do_sample = False
        config.apply_chat_template = False
        if not ignores_eos:
            config.set_eos_token_id(self._pipe.get_tokenizer().get_eos_token_id())
        return self._pipe.generate(list(prompts), [config] * len(prompts))

    def read(self, result: Any) -> tuple[list[str], int, int]:
        """From `GenerationResult`s."""
        texts = [one.m_generation_ids[0] for one in result]
        num_prompt = sum(one.perf_metrics.get_num_input_tokens() for one in result)
        # Every result of a batch counts the tokens that the whole batch generated.
        return texts, num_prompt, result[0].perf_metrics.get_num_generated_tokens()


class Llama:
    """llama.cpp's server on a local socket, the one of its programs that takes a batch of texts.

    Options: `bin`, the folder of its binaries, and `arguments` for the server.
    """

    def __init__(self, model: str, options: Options) -> None:
        from peers_llama import LlamaServer

        self._server = LlamaServer(model, options["bin"], options["arguments"])

    def generate(self, prompts: Sequence[str], num_tokens: int, ignores_eos: bool) -> Any:
        """One request that holds all prompts."""
        return self._server.complete(prompts, num_tokens, ignores_eos)

    def read(self, result: Any) -> tuple[list[str], int, int]:
        """From the server's answer."""
        num_prompt = sum(one["tokens_evaluated"] for one in result)
        return (
            [one["content"] for one in result],
            num_prompt,
            sum(one["tokens_predicted"] for one in result),
        )


ENGINES: dict[str, Callable[[str, Options], Engine]] = {
    "kvloom": Kvloom,
    "vllm": Vllm,
    "openvino": Openvino,
    "llama": Llama,
}


def answer(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """Run one command."""
    num_tokens = command.get("num_output_tokens")
    start = time.perf_counter()
    result = engine.generate(
        command["prompts"],
        command["max_tokens"] if num_tokens is None else num_tokens,
        num_tokens is not None,
    )
    seconds = time.perf_counter() - start
    texts, num_prompt_tokens, num_output_tokens = engine.read(result)
    return {
        "seconds": seconds,
        "texts": texts,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
    }


def main() -> None:
    """Load, say so, then answer commands until the input ends."""
    kind, model, options = sys.argv[1:]
    # What engines print must not come between our lines: their standard output becomes the log.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter()
    engine = ENGINES[kind](model, json.loads(options))
    print(json.dumps({"load_seconds": time.perf_counter() - start}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=replies)


if __name__ == "__main__":  # vLLM starts this file anew in its own worker process
    main()
