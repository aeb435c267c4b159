"""What a user asks for (SamplingParams) and what the engine tracks of it (Request)."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloom.errors import RequestError

MAX_LOGPROBS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        n: choices generated from the prompt; choices of one seed differ.
        temperature: 0 picks the most likely token; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the most likely one.
        seed: makes the request repeat, whatever runs beside it; None draws one from the engine's.
        presence_penalty: subtracted once from tokens already generated; -2 to 2.
        frequency_penalty: subtracted per occurrence among the generated tokens; -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
            prompt or the output; above 0, 1 is off.
        stop: strings that end generation where they begin in the generated text.
        stop_token_ids: token ids that end generation.
        bad_words: strings that are never generated.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not end at an end-of-sequence token.
        max_tokens: most tokens generated; None is the rest of the room in max_model_len.
        min_tokens: no end-of-sequence or stop token before this many tokens.
        logprobs: log-probabilities of this many most likely tokens, and of the chosen one, per
            generated token; None gives none. They are of the model's own distribution, before
            penalties and temperature.
        prompt_logprobs: the same for every prompt token but the first.
        logit_bias: added to the logits of these token ids; -100 to 100.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put a space between special tokens that are kept.
        truncate_prompt_tokens: keep only this many last tokens of the prompt.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        if self.repetition_penalty <= 0.0:
            raise RequestError("repetition_penalty", f"{self.repetition_penalty} must be above 0")
        if self.top_p == 0.0:
            raise RequestError("top_p", "0 keeps no token; give a value within (0, 1]")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
            )
        for name in ("stop", "bad_words"):
            if any(not word for word in getattr(self, name)):
                raise RequestError(name, "an empty string matches everywhere; leave it out")
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0


# Field, lowest, highest value; fields that are None are not checked.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, math.inf),
    ("min_p", 0.0, 1.0),
    ("seed", 0, 2**63 - 1),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, math.inf),
    ("max_tokens", 1, math.inf),
    ("min_tokens", 0, math.inf),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("truncate_prompt_tokens", 1, math.inf),
)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    # A NaN compares false with everything, so it fails here as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(name, f"{value!r} is not within [{low}, {high}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSamplingParams(SamplingParams):
    """SamplingParams of one choice once the engine knows model, tokenizer and room.

    Attributes:
        seed: never None; already differs between the choices of one request.
        max_tokens: never None; prompt and max_tokens fit max_model_len.
        eos_token_ids: every id that ends a sequence of this model.
        bad_words_token_ids: token sequences that must not be completed.
    """

    seed: int
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """Ids that end generation: stop_token_ids, and EOS unless it is ignored."""
        eos = frozenset() if self.ignore_eos else self.eos_token_ids
        return eos | frozenset(self.stop_token_ids)


class RequestStatus(enum.Enum):
    """Where a request is in its life. Only the scheduler changes it."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOP = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORT = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """Whether the request has left the scheduler."""
        return self.name.startswith("FINISHED")


class Request:
    """One sequence in the engine: its tokens, and how many of them have their KV stored.

    A prompt with n choices becomes n requests. `num_computed_tokens` catches up with `num_tokens`
    step by step; there are no phases.
    """

    __slots__ = (
        "block_hashes",
        "cache_salt",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "req_id",
        "sampling_params",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: ResolvedSamplingParams,
        cache_salt: str | None = None,
    ) -> None:
        """Prompt and parameters are those the engine has checked."""
        if cache_salt == "":
            raise RequestError("cache_salt", "an empty salt isolates nothing; leave it out")
        self.req_id = req_id
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        self.cache_salt = cache_salt
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the first admission: what the prefix cache saved
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []  # one per full block, grown by the KV cache manager

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]
