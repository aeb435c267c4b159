"""LLM on a tiny random model: every rule here follows from the parameters' definitions."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from kvloom import LLM, SamplingParams
from kvloom.ops.isa import built_isas
from kvloom.ops.reference import ReferenceBackend
from kvloom.step import MAX_EXTRA_LOGITS_ROWS
from tiny_folder import greedy, make_tiny_folder
from tiny_models import TinyRunner, build_loaded

PROMPT = "The quick brown fox"


def test_outputs_come_in_prompt_order_and_count_their_tokens(llm: LLM) -> None:
    prompts = ["a", "bb", PROMPT, [1, 2, 3]]
    outputs = llm.generate(prompts, greedy())
    assert [o.prompt for o in outputs] == ["a", "bb", PROMPT, None]
    assert [len(o.prompt_token_ids) for o in outputs] == [1, 2, len(PROMPT), 3]
    for output in outputs:
        [choice] = output.outputs
        assert len(choice.token_ids) == 8
        assert choice.finish_reason == "length"
        assert choice.text == llm.tokenizer.decode(choice.token_ids, True, True)


def test_batch_mates_do_not_change_a_text(llm: LLM) -> None:
    prompts = [PROMPT[:n] for n in (1, 5, 16, 17, 19)]
    alone = [llm.generate(p, greedy())[0].outputs[0].token_ids for p in prompts]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy())]
    assert together == alone


def test_one_prompt_is_a_batch_of_one(llm: LLM) -> None:
    [text] = llm.generate("ab", greedy())
    ids = llm.tokenizer.encode("ab", add_special_tokens=True)
    [tokens] = llm.generate(ids, greedy())
    assert text.outputs[0].token_ids == tokens.outputs[0].token_ids


def test_a_seed_repeats_and_its_choices_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
    [first] = llm.generate(PROMPT, params)
    [again] = llm.generate(PROMPT, params)
    texts = [tuple(c.token_ids) for c in first.outputs]
    assert texts == [tuple(c.token_ids) for c in again.outputs]
    assert len(set(texts)) == 4
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    [other] = llm.generate(PROMPT, SamplingParams(n=4, seed=8, max_tokens=12, ignore_eos=True))
    assert texts != [tuple(c.token_ids) for c in other.outputs]


def test_a_seeded_text_does_not_depend_on_batch_mates(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    [alone] = llm.generate(PROMPT, params)
    *_, together = llm.generate(
        ["x", "yy", PROMPT], [greedy(), SamplingParams(max_tokens=5), params]
    )
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids


def test_unseeded_requests_differ_but_the_whole_run_repeats(folder: Path) -> None:
    runs = []
    for _ in range(2):
        llm = LLM(model=str(folder), num_blocks=50, seed=5)
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        runs.append([o.outputs[0].token_ids for o in llm.generate([PROMPT] * 3, params)])
        llm.shutdown()
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 3


def test_eos_ends_and_is_no_text_unless_ignored(llm: LLM) -> None:
    force_eos = {"logit_bias": {257: 100.0}, "temperature": 0.0, "max_tokens": 4}
    [output] = llm.generate(PROMPT, SamplingParams(**force_eos))
    [choice] = output.outputs
    assert (choice.token_ids, choice.text) == ([257], "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    [ignored] = llm.generate(PROMPT, SamplingParams(**force_eos, ignore_eos=True))
    assert ignored.outputs[0].token_ids == [257] * 4
    assert ignored.outputs[0].finish_reason == "length"


def test_stop_token_id_ends_and_is_named(llm: LLM) -> None:
    [plain] = llm.generate(PROMPT, greedy())
    ids = plain.outputs[0].token_ids
    stop_id = ids[3]
    end = ids.index(stop_id) + 1
    [stopped] = llm.generate(PROMPT, greedy(stop_token_ids=[stop_id]))
    [choice] = stopped.outputs
    assert choice.token_ids == ids[:end]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop_id)
    assert choice.text == llm.tokenizer.decode(ids[: end - 1], True, True)
    [kept] = llm.generate(PROMPT, greedy(stop_token_ids=[stop_id], include_stop_str_in_output=True))
    assert kept.outputs[0].text == llm.tokenizer.decode(ids[:end], True, True)


def test_stop_string_ends_text_and_frees_the_request(llm: LLM) -> None:
    forced = "abcd"
    ids = llm.tokenizer.encode(forced, add_special_tokens=False)
    params = greedy(max_tokens=20, logit_bias={ids[1]: 100.0}, stop=["bb"])
    [output] = llm.generate(PROMPT, params)
    [choice] = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "bb")
    assert choice.token_ids == [ids[1]] * 2


def test_min_tokens_holds_eos_back(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, logit_bias={257: 100.0}, min_tokens=3, max_tokens=9)
    [output] = llm.generate(PROMPT, params)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].token_ids[-1] == 257
    assert 257 not in output.outputs[0].token_ids[:3]


def test_bad_words_never_appear(llm: LLM) -> None:
    [plain] = llm.generate(PROMPT, greedy(max_tokens=20))
    word = llm.tokenizer.decode(plain.outputs[0].token_ids[:1], True, True)
    [without] = llm.generate(PROMPT, greedy(max_tokens=20, bad_words=[word]))
    assert plain.outputs[0].token_ids[0] not in without.outputs[0].token_ids


def test_logprobs_are_those_of_the_whole_prompt_run(llm: LLM) -> None:
    """Generated logprobs equal the prompt logprobs of prompt + output: one model, two paths."""
    [output] = llm.generate(PROMPT, greedy(logprobs=3))
    [choice] = output.outputs
    whole = output.prompt_token_ids + choice.token_ids
    [scored] = llm.generate(whole, greedy(max_tokens=1, prompt_logprobs=3))
    assert len(scored.prompt_logprobs) == len(whole) - 1
    tail = scored.prompt_logprobs[len(output.prompt_token_ids) - 1 :]
    for ours, theirs in zip(choice.logprobs, tail, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.rank == theirs.rank == 1
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
        assert len(ours.top) == 3


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_long_prompt_is_scored_as_if_at_once(tmp_path: Path, backend: str) -> None:
    """Steps bound their rows of logits; the truth is the log-softmax of a pass without steps."""
    if backend == "native" and not built_isas():
        pytest.skip("the native library is not built")
    folder = make_tiny_folder(tmp_path, head_dim=16, max_position_embeddings=1024)
    prompt = np.random.default_rng(0).integers(0, 258, 2 * MAX_EXTRA_LOGITS_ROWS + 100).tolist()
    reference = ReferenceBackend()
    model = build_loaded(json.loads((folder / "config.json").read_text()), reference)
    logits = TinyRunner(model, reference).step(prompt).astype(np.float64)
    truth = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))  # [num_tokens, vocab_size]

    llm = LLM(model=folder, backend=backend, num_blocks=200)
    mate, scored = llm.generate([[1, 2, 3], prompt], greedy(max_tokens=4, prompt_logprobs=2))
    llm.shutdown()
    assert len(mate.prompt_logprobs) == 2
    assert [score.token_id for score in scored.prompt_logprobs] == prompt[1:]
    for row, score in zip(truth[:-1], scored.prompt_logprobs, strict=True):
        assert score.logprob == pytest.approx(row[score.token_id], abs=1e-4)
        assert score.top[0] == (row.argmax(), pytest.approx(row.max(), abs=1e-4))
    assert scored.outputs[0].token_ids[0] == truth[-1].argmax()


def test_prompt_logprobs_are_given_once_for_many_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, prompt_logprobs=0, max_tokens=2, seed=1, ignore_eos=True)
    [output] = llm.generate(PROMPT, params)
    assert len(output.prompt_logprobs) == len(PROMPT) - 1
    assert all(np.isfinite(entry.logprob) for entry in output.prompt_logprobs)


def test_cached_tokens_follow_from_block_size(llm: LLM) -> None:
    prompt = list(range(40))
    [cold] = llm.generate(prompt, greedy())
    [warm] = llm.generate(prompt, greedy())
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    llm.reset_prefix_cache()
    [forgotten] = llm.generate(prompt, greedy())
    assert forgotten.num_cached_tokens == 0


def test_stream_is_the_same_text_in_pieces(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, greedy(max_tokens=30))
    deltas = list(llm.stream(PROMPT, greedy(max_tokens=30)))
    assert "".join(d.text for d in deltas) == whole.outputs[0].text
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_two_streams_interleave(llm: LLM) -> None:
    texts = [llm.generate(p, greedy())[0].outputs[0].text for p in ("one", "two")]
    first, second = llm.stream("one", greedy()), llm.stream("two", greedy())
    pieces = ["", ""]
    for both in zip_longest(first, second):
        for i, delta in enumerate(both):
            pieces[i] += "" if delta is None else delta.text
    assert pieces == texts


def test_closing_a_stream_aborts_only_its_request(llm: LLM) -> None:
    other = llm.stream("two", greedy())
    next(other)
    stream = llm.stream("one", greedy(max_tokens=100))
    next(stream)
    stream.close()
    assert llm.stats.scheduler.num_running == 1
    assert "".join(d.text for d in other)
    assert llm.stats.scheduler.num_running == 0


def test_a_stream_that_never_began_leaves_nothing(llm: LLM) -> None:
    llm.stream("one", greedy()).close()
    llm.stream("two", greedy())  # dropped
    assert not llm._core.has_unfinished_requests()
    assert not llm._running


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [answer] = llm.chat(messages, greedy())
    assert answer.prompt == "user:hi\nassistant:"
    several = llm.chat([messages, messages], greedy())
    assert [a.outputs[0].token_ids for a in several] == [answer.outputs[0].token_ids] * 2


def test_truncate_keeps_the_last_tokens(llm: LLM) -> None:
    [output] = llm.generate("abcdef", greedy(truncate_prompt_tokens=2))
    assert output.prompt_token_ids == llm.tokenizer.encode("ef", add_special_tokens=False)


def test_nan_weights_become_an_error_of_the_request(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = make_tiny_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, folder / "model.safetensors")
    llm = LLM(model=str(folder), num_blocks=20)
    [output] = llm.generate("abc", greedy())
    [choice] = output.outputs
    assert choice.finish_reason == "error"
    assert choice.error is not None
    assert "NaN" in choice.error
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_give_the_same_text(folder: Path, llm: LLM, size: int) -> None:
    """4 query and 2 KV heads: at 4 ranks each KV head is held twice."""
    prompts = [PROMPT, "other"]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy())]
    parallel = LLM(model=str(folder), num_blocks=200, tensor_parallel_size=size)
    outputs = parallel.generate(prompts, greedy())
    parallel.shutdown()
    assert [o.outputs[0].token_ids for o in outputs] == expected
