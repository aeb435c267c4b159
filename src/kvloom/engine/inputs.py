"""From what a user hands in to requests the scheduler takes: every check happens here."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import numpy as np

from kvloom.errors import ConfigError, RequestError
from kvloom.request import Request, ResolvedSamplingParams, SamplingParams, check_priority
from kvloom.sampling.grammar_checker import GrammarChecker
from kvloom.sampling.sampler import derive_seed
from kvloom.tokenizer import ChatOptions, Tokenizer

Prompt = str | Sequence[int]
Message = dict[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A checked prompt: `text` is None when the user gave token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class InputProcessor:
    """Turns prompts and parameters into requests, or raises a RequestError naming the field.

    Attributes:
        limits: what requests are checked against.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, seed: int) -> None:
        self._tokenizer = tokenizer
        self.limits = limits
        self._seed = seed
        self._num_prompts = 0
        self._grammars = GrammarChecker()

    def prepare_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        options: ChatOptions | None = None,
    ) -> PreparedPrompt:
        """Render messages with the model's chat template, which places BOS itself."""
        if not self._tokenizer.has_chat_template:
            raise ConfigError("the model has no chat template; use generate with a plain prompt")
        if not _is_list(messages):
            raise _no_messages(messages)
        if not len(messages):
            raise RequestError("messages", "empty; give at least one message")
        text = self._tokenizer.render_chat(messages, options)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self._check(text, ids, params)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """Tokenise a text (special tokens added as the model asks), or take token ids as given."""
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise _no_prompt(prompt)
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, add_special_tokens=True)
            return self._check(prompt, ids, params)
        return self._check(None, [_as_token_id(token_id) for token_id in prompt], params)

    def _check(self, text: str | None, ids: list[int], params: SamplingParams) -> PreparedPrompt:
        self.check_grammar(params)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not ids:
            raise RequestError("prompt", "empty; give at least one token")
        vocab_size = self.limits.vocab_size
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError("prompt", f"token id {token_id} is not within [0, {vocab_size})")
        room = self.limits.max_model_len - len(ids)
        if room < max(params.max_tokens or 1, params.min_tokens):
            raise RequestError(
                "prompt" if params.max_tokens is None or room <= 0 else "max_tokens",
                f"{len(ids)} prompt tokens and {max(params.max_tokens or 1, params.min_tokens)} "
                f"output tokens do not fit max_model_len {self.limits.max_model_len}; "
                "shorten the prompt or ask for fewer tokens",
            )
        for name, given in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            for token_id in given:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(name, f"token id {token_id} is not within [0, {vocab_size})")
        return PreparedPrompt(text, ids)

    def check_grammar(self, params: SamplingParams) -> None:
        """Refuse a grammar that cannot work, which takes seconds at worst, and no time again."""
        if params.structured_outputs is None:
            return
        if not self.limits.eos_token_ids:
            raise RequestError(
                "structured_outputs", "the model has no end-of-sequence token to end a text with"
            )
        self._grammars.check(params.structured_outputs)

    def make_requests(
        self,
        req_ids: Sequence[str],
        prompt: PreparedPrompt,
        params: SamplingParams,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """One request per choice: `req_ids` has params.n entries.

        Requests share cached prefixes only with those of the same `cache_salt`; those of a lower
        `priority` run first.
        """
        base_seed = params.seed
        if base_seed is None:
            base_seed = derive_seed(self._seed, self._num_prompts)
        self._num_prompts += 1
        given = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
        given["max_tokens"] = params.max_tokens or (
            self.limits.max_model_len - len(prompt.token_ids)
        )
        bad_words = self._bad_words_token_ids(params.bad_words)
        requests = []
        for choice, req_id in enumerate(req_ids):
            given["seed"] = derive_seed(base_seed, choice)
            if choice > 0:
                given["prompt_logprobs"] = None  # they are the same for every choice
            resolved = ResolvedSamplingParams(
                **given,
                eos_token_ids=self.limits.eos_token_ids,
                bad_words_token_ids=bad_words,
            )
            requests.append(Request(req_id, prompt.token_ids, resolved, cache_salt, priority))
            if choice > 0:
                requests[choice].leader = requests[0]
        return requests

    def _bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """A word is written differently at the start of a text and after a space: ban both."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                # A tokenizer may know tokens that the model has no row for: those are never drawn.
                if ids and max(ids) < self.limits.vocab_size:
                    sequences[ids] = None
        return tuple(sequences)

    def shutdown(self) -> None:
        """End the process that checks grammars."""
        self._grammars.close()


def is_chat(prompt: object) -> bool:
    """Whether it is a list of messages."""
    return _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt becomes a batch of one: a text, or a list that holds token ids.

    Raises:
        RequestError: it is neither a prompt nor a list.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise _no_prompt(prompts)
    return [prompts] if len(prompts) and _is_number(prompts[0]) else list(prompts)


def as_chats(messages: Any) -> list[Sequence[Message]]:
    """One conversation becomes a batch of one.

    Raises:
        RequestError: it is no list.
    """
    if not _is_list(messages):
        raise _no_messages(messages)
    return [messages] if is_chat(messages) else list(messages)


def as_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt; one for all of them is repeated.

    Raises:
        RequestError: they are of another kind, or not as many as prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not _is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("params", "give SamplingParams(...), or a list with one per prompt")
    if len(params) != num_prompts:
        raise RequestError(
            "params", f"{len(params)} for {num_prompts} prompts; give one, or one per prompt"
        )
    return list(params)


def as_priorities(priority: Any, num_prompts: int) -> list[int]:
    """The priority of each prompt; one for all of them is repeated.

    Raises:
        RequestError: one is no integer, or they are not as many as prompts.
    """
    priorities = list(priority) if _is_list(priority) else [priority] * num_prompts
    if len(priorities) != num_prompts:
        raise RequestError(
            "priority", f"{len(priorities)} for {num_prompts} prompts; give one, or one per prompt"
        )
    for one in priorities:
        check_priority(one)
    return priorities


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """A sequence or an array of other things than characters or bytes."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    is_text = isinstance(value, str | bytes | bytearray | memoryview)
    return isinstance(value, Sequence) and not is_text


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)


def _as_token_id(value: Any) -> int:
    """Integers of any library count, truth values do not."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise RequestError("prompt", f"{value!r} is not a token id; give integers")


def _no_prompt(value: object) -> RequestError:
    kind = type(value).__name__
    return RequestError("prompt", f"{kind} is no prompt; give a text or a list of token ids")


def _no_messages(value: object) -> RequestError:
    kind = type(value).__name__
    return RequestError(
        "messages", f"{kind} is no conversation; give [{{'role': 'user', 'content': ...}}]"
    )
