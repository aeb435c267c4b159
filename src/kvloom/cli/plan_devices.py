"""Which devices, and how many: plans side by side, and the fewest that hold a number of users."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

from kvloom.cli.plan_budget import MemorySource
from kvloom.config import AUTO, Auto, EngineConfig, ParallelConfig, resolve_block_size
from kvloom.errors import CapacityError, ConfigError, ParallelSizeError, UnsupportedModelError
from kvloom.kv.memory import NEURON_STACK_BYTES, format_bytes
from kvloom.kv.spec import cdiv
from kvloom.simulate.cost import RooflineCost
from kvloom.simulate.devices import DEVICES, find_device
from kvloom.simulate.report import Row, align
from kvloom.simulate.setup import ModelSource, RankModels, build_ranks, plan_ranks
from kvloom.simulate.work import StepShape

_SIZES = (1, 2, 4, 8, 16, 32, 64)  # of tensor parallelism: what machines and switches come in
_HEADER = (
    "device",
    "tp",
    "replicas",
    "devices",
    "weights",
    "KV",
    "max context",
    "holds",
    "in vLLM",
    "s/token",
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of devices.

    Attributes:
        devices: names from the catalogue.
        num_users: requests that are to be held at once; None asks for the fewest ranks that work.
        context: tokens of each, prompt and output; None is the model's limit, or what fits.
    """

    devices: tuple[str, ...]
    num_users: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        for name in self.devices:
            find_device(name)
        if self.num_users is not None and (self.num_users < 1 or self.context is None):
            raise ConfigError("give --for-users at least 1, and --context with it")

    @classmethod
    def parse(cls, devices: str, num_users: int | None, context: int | None) -> Question:
        """Devices as "h100,h200", or "all": those with a memory of their own."""
        if devices == "all":
            names = tuple(name for name, d in DEVICES.items() if d.memory_bytes is not None)
        else:
            names = tuple(devices.split(","))
        return cls(names, num_users, context)


@dataclass(frozen=True, slots=True)
class Answer:
    """One way to serve the model.

    Attributes:
        num_devices: ranks of all replicas; on Trainium logical cores, four of which are a chip.
        weights_bytes, kv_bytes: of a rank.
        max_context: the longest request that one replica holds.
        context: tokens of a request in what follows.
        num_held: such requests that all replicas hold.
        num_held_by_vllm: in vLLM's layout; None where it has none, or the same one.
        seconds_per_token: of a step in which all these requests get a token, or all users if given.
    """

    device: str
    tensor_parallel_size: int
    num_replicas: int
    num_devices: int
    weights_bytes: int
    kv_bytes: int
    max_context: int
    context: int
    num_held: int
    num_held_by_vllm: int | None
    seconds_per_token: float

    @property
    def row(self) -> Row:
        """Its line of the table."""
        vllm = "" if self.num_held_by_vllm is None else f"{self.num_held_by_vllm:,}"
        return (
            self.device,
            f"{self.tensor_parallel_size}",
            f"{self.num_replicas:,}",
            f"{self.num_devices:,}",
            format_bytes(self.weights_bytes),
            format_bytes(self.kv_bytes),
            f"{self.max_context:,}",
            f"{self.num_held:,}",
            vllm,
            f"{self.seconds_per_token:.4f}",
        )


def find_answers(config: EngineConfig, source: ModelSource, question: Question) -> list[Answer]:
    """With users, all sizes up to one replica, fewest devices first; else each device's least.

    Raises:
        CapacityError: nothing works.
    """
    answers: list[Answer] = []

    @cache  # devices of one block size share the models, which take the longest
    def build(num_ranks: int, block_size: int) -> RankModels:
        sized = replace(config, parallel=ParallelConfig(num_ranks))
        return build_ranks(sized, replace(source, block_size=block_size))

    for name in question.devices:
        answers += _answers_of(name, config, build, question)
    if not answers:
        raise CapacityError(
            f"no tensor-parallel size up to {_SIZES[-1]} holds one request on "
            f"{', '.join(question.devices)}; lower --context, or choose larger devices"
        )
    if question.num_users is None:
        return answers
    return sorted(answers, key=lambda a: (a.num_devices, a.seconds_per_token))


def _answers_of(
    name: str,
    config: EngineConfig,
    build: Callable[[int, int], RankModels],
    question: Question,
) -> Iterator[Answer]:
    """Of growing sizes, up to the first with one replica: all beyond take more devices."""
    block_size = resolve_block_size(config.cache.block_size, name)
    for size in _SIZES:
        sized = replace(config, parallel=ParallelConfig(size))
        try:
            answer = _answer(name, sized, build(size, block_size), question)
        except (CapacityError, ParallelSizeError):
            continue
        yield answer
        if answer.num_replicas == 1:
            return


def _answer(name: str, config: EngineConfig, ranks: RankModels, question: Question) -> Answer:
    """Raises CapacityError if one replica does not hold one request."""
    memory = MemorySource(name)
    longest = plan_ranks(_with_length(config, AUTO), ranks, memory)
    context = question.context or longest.max_model_len
    config = _with_length(config, context)
    plan = plan_ranks(config, ranks, memory)
    held = int(plan.max_concurrency)
    num_replicas = 1 if question.num_users is None else cdiv(question.num_users, held)
    num_ranks = config.parallel.tensor_parallel_size
    num_sharing = held if question.num_users is None else cdiv(question.num_users, num_replicas)
    cost = RooflineCost(ranks.work, find_device(name), num_ranks)
    step = StepShape([(context - 1, 1)] * num_sharing, num_sharing)
    return Answer(
        device=name,
        tensor_parallel_size=num_ranks,
        num_replicas=num_replicas,
        num_devices=num_replicas * num_ranks,
        weights_bytes=max(ranks.weights_bytes),
        kv_bytes=min(plan.available_bytes),
        max_context=longest.max_model_len,
        context=context,
        num_held=num_replicas * held,
        num_held_by_vllm=_held_by_vllm(config, ranks, memory, num_replicas),
        seconds_per_token=cost.step_seconds(step),
    )


def _with_length(config: EngineConfig, max_model_len: int | Auto) -> EngineConfig:
    model = replace(config.model, max_model_len=max_model_len)
    return replace(config, model=model)


def _held_by_vllm(
    config: EngineConfig, ranks: RankModels, memory: MemorySource, num_replicas: int
) -> int | None:
    """Where layers differ; elsewhere vLLM has the same layout."""
    if len({type(spec) for spec in ranks.specs[0].values()}) == 1:
        return None
    try:
        theirs = plan_ranks(config, ranks, memory, "vllm")
    except (CapacityError, UnsupportedModelError):
        return None
    # vLLM counts block 0, which holds nothing.
    return int(theirs.max_concurrency * (theirs.num_blocks - 1) / theirs.num_blocks) * num_replicas


def as_json(answers: Sequence[Answer]) -> str:
    """A list of objects."""
    return json.dumps([asdict(answer) for answer in answers], indent=2) + "\n"


def as_text(title: str, answers: Sequence[Answer], question: Question) -> str:
    """A table, and what its columns mean."""
    rows = [_HEADER, *(answer.row for answer in answers)]
    if not any(answer.num_held_by_vllm for answer in answers):
        column = _HEADER.index("in vLLM")
        rows = [row[:column] + row[column + 1 :] for row in rows]
    notes = [
        "holds: requests at once, of the model's longest, or of what fits"
        if question.context is None
        else f"holds: requests of {question.context:,} tokens at once, prompt and output"
    ]
    if question.num_users is not None:
        best = answers[0]
        notes.insert(
            0,
            f"fewest devices for {question.num_users:,} users: {best.num_devices} x {best.device}, "
            f"--tp {best.tensor_parallel_size}, {best.num_replicas} replica(s)",
        )
    notes.append(
        "s/token: computed for a step of all these requests (kvloom simulate runs them in time)"
        if question.num_users is None
        else "s/token: computed for a step of all users (kvloom simulate runs them in time)"
    )
    if any(answer.device in NEURON_STACK_BYTES for answer in answers):
        notes.append("trn devices are logical cores: four of them are a chip")
    return f"{title}\n\n{align(rows)}\n" + "".join(f"  {note}\n" for note in notes)
