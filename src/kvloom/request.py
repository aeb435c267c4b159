"""What a user asks for (SamplingParams) and what the engine tracks of it (Request)."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvloom.errors import RequestError
from kvloom.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 50
MAX_PRIORITY = 2**31 - 1  # in both directions


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
            prompt or the output; 0.01 to 100, 1 is off.
        stop: strings that end generation where they begin in the generated text. The one completed
            first counts; of two completed by the same character, the longer.
        stop_token_ids: token ids that end generation.
        bad_words: strings that are not generated in the tokens they encode to, with and without a
            space before them. Like `stop`, they count within the generated text only.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not end at an end-of-sequence token.
        max_tokens: most tokens generated; None is the rest of the room in max_model_len.
        min_tokens: no end-of-sequence or stop token among this many first tokens; stop strings
            that these tokens complete are passed over.
        logprobs: log-probabilities of this many most likely tokens, and of the chosen one, per
            generated token; None gives none. They are of the model's own distribution, before
            penalties and temperature.
        prompt_logprobs: the same for every prompt token but the first.
        logit_bias: added to the logits of these token ids; -100 to 100.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put a space between special tokens that are kept.
        truncate_prompt_tokens: keep only this many last tokens of the prompt.
        structured_outputs: what the text must be. It ends, with "stop", as soon as nothing can
            follow; where the text may end or go on, an end-of-sequence token ends it. Stop strings,
            stop tokens and max_tokens end it even before it is complete. Special tokens, and
            end-of-sequence tokens before the end, are not generated.
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
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name), str))
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, int)
        object.__setattr__(self, "stop_token_ids", ids)
        for flag in (f.name for f in fields(SamplingParams) if f.type == "bool"):
            if not isinstance(getattr(self, flag), bool):
                raise RequestError(flag, f"{getattr(self, flag)!r} is no flag; give True or False")
        for name, kind, low, high in PARAM_RANGES:
            _check_range(name, getattr(self, name), kind, (low, high))
        if self.top_p == 0.0:
            raise RequestError("top_p", "0 keeps no token; give a value within (0, 1]")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
            )
        for name in ("stop", "bad_words"):
            for word in getattr(self, name):
                if not word:
                    raise RequestError(name, "an empty string matches everywhere; leave it out")
                check_unicode(name, word)
        _check_logit_bias(self.logit_bias)
        self._check_structured_outputs()

    def _check_structured_outputs(self) -> None:
        structured = self.structured_outputs
        if structured is None:
            return
        if not isinstance(structured, StructuredOutputs):
            raise RequestError("structured_outputs", "give StructuredOutputs(...)")
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos", "structured_outputs say where the text ends; leave it out"
            )
        if self.min_tokens:
            raise RequestError(
                "min_tokens",
                "structured_outputs say how long the text is: with minLength, minItems, {n,}, ...",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0


def check_unicode(name: str, text: str) -> None:
    """Refuse what has no bytes in UTF-8, so that no tokenizer takes it.

    Raises:
        RequestError: field `name` holds half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            name, f"character {error.start} is half of a surrogate pair; send valid Unicode"
        ) from None


def check_priority(priority: Any) -> None:
    """Refuse what is no priority.

    Raises:
        RequestError: it is no integer, or too large.
    """
    _check_range("priority", priority, int, (-MAX_PRIORITY, MAX_PRIORITY))


_OPTIONAL = frozenset(
    {"seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
)

# Field, kind, lowest, highest value.
PARAM_RANGES: tuple[tuple[str, type, float, float], ...] = (
    ("n", int, 1, 128),
    ("temperature", float, 0.0, 1e6),
    ("top_p", float, 0.0, 1.0),
    ("top_k", int, 0, math.inf),
    ("min_p", float, 0.0, 1.0),
    ("seed", int, 0, 2**63 - 1),
    ("presence_penalty", float, -2.0, 2.0),
    ("frequency_penalty", float, -2.0, 2.0),
    ("repetition_penalty", float, 0.01, 100.0),
    ("max_tokens", int, 1, math.inf),
    ("min_tokens", int, 0, math.inf),
    ("logprobs", int, 0, MAX_LOGPROBS),
    ("prompt_logprobs", int, 0, MAX_LOGPROBS),
    ("truncate_prompt_tokens", int, 1, math.inf),
)


def _is_a(kind: type, value: object) -> bool:
    """Like isinstance, but a bool is no number and an integer is a float."""
    kinds = (int, float) if kind is float else (kind,)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _as_tuple(name: str, values: Iterable[Any], kind: type) -> tuple[Any, ...]:
    """`values` as a tuple; one string stands for a list of itself."""
    if isinstance(values, str):
        values = (values,)
    if not isinstance(values, Iterable):
        raise RequestError(name, f"{values!r} is not a list")
    given = tuple(values)
    for value in given:
        if not _is_a(kind, value):
            raise RequestError(name, f"{value!r} is not of type {kind.__name__}")
    return given


def _check_range(name: str, value: Any, kind: type, bounds: tuple[float, float]) -> None:
    if value is None and name in _OPTIONAL:
        return
    low, high = bounds
    # A NaN compares false with everything, so it fails here as well.
    if not _is_a(kind, value) or not low <= value <= high:
        number = "an integer" if kind is int else "a number"
        limits = f"of at least {low}" if high == math.inf else f"within [{low}, {high}]"
        raise RequestError(name, f"{value!r} is not {number} {limits}")


def _check_logit_bias(biases: Any) -> None:
    if not isinstance(biases, Mapping):
        raise RequestError("logit_bias", f"{biases!r} is no dict of token ids and numbers")
    _as_tuple("logit_bias", biases, int)
    for token_id, bias in biases.items():
        _check_range(f"logit_bias[{token_id}]", bias, float, (-100.0, 100.0))


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

    WAITING_FOR_GRAMMAR = "waiting for its grammar"
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
        "leader",
        "num_bypasses",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "place",
        "priority",
        "req_id",
        "runs_ahead",
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
        priority: int = 0,
    ) -> None:
        """Prompt and parameters are those the engine has checked; a lower `priority` runs first."""
        if cache_salt == "":
            raise RequestError("cache_salt", "an empty salt isolates nothing; leave it out")
        check_priority(priority)
        self.req_id = req_id
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        self.cache_salt = cache_salt
        self.priority = priority
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the first admission: what the prefix cache saved
        self.num_preemptions = 0
        self.place = (0, 0)  # in the order that the scheduler keeps; given when it is added
        self.num_bypasses = 0  # requests behind it in line that entered before it
        self.block_hashes: list[bytes] = []  # one per full block, grown by the KV cache manager
        # A request with the same tokens but the last, or more: this one forks its KV, if it can.
        self.leader: Request | None = None
        # Whether a token may be computed before anybody knows it: not where a grammar must see it
        # first, to tell what may follow.
        self.runs_ahead = sampling_params.structured_outputs is None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_queried_tokens(self) -> int:
        """Tokens its user asks the prefix cache for by letting it enter: those of a prompt, once.

        A preempted request asks nothing new, nor does one that goes on with another's output.
        """
        leader = self.leader
        is_asked = leader is None or self.num_prompt_tokens <= leader.num_prompt_tokens
        return 0 if self.num_preemptions or not is_asked else self.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]
