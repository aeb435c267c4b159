"""Feeds random and hostile calls to the native program; run as a script, since it may crash.

    python native_fuzz.py SECONDS SEED

Prints how many steps were computed and how many calls were refused.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from kvloom.dtypes import DType
from kvloom.ops.backend import LateTokens, StepSizes
from kvloom.ops.base import AttentionMetadata, Batch
from native_runner import NUM_BLOCKS, Chunk, NativeRunner, make_backend, make_batch
from tiny_models import CASES

CONFIG = {**CASES["llama_mha_biases"], "head_dim": 32, "max_position_embeddings": 200}
SIZES = StepSizes(
    max_num_tokens=96, max_num_reqs=4, max_num_rows=96, max_model_len=200, block_size=16
)
NUMBERS = (-(2**62), -(2**31), -2, -1, 0, 1, 15, 16, 17, 96, 199, 200, NUM_BLOCKS, 2**31, 2**62)
REFUSALS = (ValueError, TypeError, OverflowError, MemoryError)


def valid_batch(rng: random.Random) -> Batch:
    """Any mixture of chunks that fits the sizes; tables may share blocks."""
    chunks, room = [], SIZES.max_num_tokens
    for _ in range(rng.randint(1, SIZES.max_num_reqs)):
        count = rng.randint(1, min(room, rng.choice([1, 2, 40, 96])))
        room -= count
        table = [rng.randrange(NUM_BLOCKS) for _ in range(SIZES.max_model_len // 16 + 1)]
        computed = rng.randint(0, SIZES.max_model_len - count)
        ids = [rng.randrange(CONFIG["vocab_size"]) for _ in range(count)]
        chunks.append(Chunk(ids, np.array(table, np.int32), computed))
        if room == 0:
            break
    batch = make_batch(chunks, SIZES.block_size)
    batch = replace(batch, wants_best_only=rng.random() < 0.3)
    if rng.random() < 0.5:
        return batch
    (group,) = batch.attention
    firsts = np.zeros(len(chunks), np.int32)
    return replace(batch, attention=[replace(group, first_columns=firsts)])


def spoil(array: Any, rng: random.Random) -> Any:
    """The array with other numbers, another length, another type, or something else altogether."""
    array = np.array(array)
    if array.ndim == 0 or array.dtype.kind not in "iu":
        return array  # spoilt already
    kind = rng.randrange(7)
    if kind < 3 and array.size:
        number = rng.choice(NUMBERS)
        limits = np.iinfo(array.dtype)
        array.flat[rng.randrange(array.size)] = max(limits.min, min(limits.max, number))
    elif kind == 3:
        array = array[: rng.randint(0, len(array))]
    elif kind == 4:
        array = np.concatenate([array, array])
    elif kind == 5:
        array = array.astype(rng.choice(["f4", "u1", "i2", "U3", "i8", "i4"]))
    else:
        array = rng.choice([None, "x", 3, [], array[None], array[..., None], array[::2]])
    return array


def hostile_batch(rng: random.Random) -> Batch:
    batch = valid_batch(rng)
    metadata = batch.attention[0]
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([f.name for f in fields(Batch) + fields(AttentionMetadata)])
        if name == "attention":
            batch = replace(batch, attention=rng.choice([[metadata], [metadata] * 2]))
        elif hasattr(batch, name):
            batch = replace(batch, **{name: spoil(getattr(batch, name), rng)})
        elif name != "block_size":
            metadata = replace(metadata, **{name: spoil(getattr(metadata, name), rng)})
            batch = replace(batch, attention=[metadata])
    return batch


def late_tokens(rng: random.Random) -> LateTokens:
    """Places, rows and ids that may not be there; the ids change once the step has started."""
    count = rng.randint(0, 3)
    late = LateTokens(
        places=np.array([rng.choice([0, 0, 1, 5]) for _ in range(count)], np.int64),
        rows=np.array([rng.randrange(2) for _ in range(count)], np.int64),
        sampled_ids=np.array([rng.choice([0, 3, 7]) for _ in range(3)], np.int32),
    )
    if rng.random() < 0.5:
        name = rng.choice([f.name for f in fields(LateTokens)])
        late = replace(late, **{name: spoil(getattr(late, name), rng)})
    return late


class BadBuilder:
    """Calls of a program's builder that may or may not fit together."""

    def __init__(self, library: Any, team: Any, rng: random.Random) -> None:
        self.kernels, self.team, self.rng = library, team, rng
        slots = [library.SlotSpec(i == 3, self.pick([4096], [0, 128, 256])) for i in range(4)]
        most = {f"max_num_{name}": self.pick([1, 8], [-1]) for name in ("tokens", "rows")}
        length = self.pick([64], [0, 2**40])
        sizes = library.ProgramSizes(**most, max_num_requests=1, max_model_len=length)
        self.program = library.Program(team, sizes, slots)

    def pick(self, usual: list[Any], rare: list[Any]) -> Any:
        return self.rng.choice(rare if self.rng.random() < 0.1 else usual)

    def number(self) -> int:
        return self.pick([1, 32], [*NUMBERS, 64, 3])

    def slot(self) -> int:
        return self.pick([0, 1, 2], [-1, 3, 4, 2**31 - 1])

    def operand(self, width: int = 32) -> Any:
        width = self.pick([width], [1, 4, 32, 64, -1])
        columns = self.pick([(0, 0)], [(0, 64), (32, 64), (-1, 64), (0, 2**31 - 1)])
        return self.kernels.Operand(self.slot(), self.pick([False], [True]), width, *columns)

    def weight(self, num_matrices: int = 1, is_gated: bool = False) -> Any:
        return self.kernels.WeightPool().allocate(
            self.pick(["F32", "Q8"], ["BF16", "Q4"]),
            is_gated,
            self.pick([64 if is_gated else 32], [33, 64]),
            32,
            self.pick([num_matrices], [1, 2, 0, 2**40]),
        )

    def vector(self) -> Any:
        return np.ones(self.pick([32], [1, 2, 64, 128]), np.float32)

    def layer(self) -> Any:
        rng = self.rng
        order = self.kernels.ExpertOrder(2, 2, self.pick([8], [1, 2**30]))
        return self.kernels.ExpertLayer(
            order=order,
            routes=self.operand(4),
            scales=self.pick([None, np.ones(2, np.float32)], [self.vector()]),
            weighs_input=rng.random() < 0.5,
        )

    def row_calls(self) -> list[Callable[[], Any]]:
        rng, program, operand, vector = self.rng, self.program, self.operand, self.vector
        maps = ["add", "multiply", "soft_cap", "silu", "tanh", "relu"]
        runs = ["rms_norm", "layer_norm", "add_norm", "gaussian_top", "match_rms"]
        table = np.ones((self.pick([64], [1]), self.pick([2, 32], [3, 64, 0])), np.float32)
        return [
            lambda: program.map(rng.choice(maps), operand(), operand(), self.number(), operand()),
            lambda: program.map_weight(rng.choice(maps), operand(), vector(), operand()),
            lambda: program.map_number(rng.choice(maps), operand(), 2.0, operand()),
            lambda: program.run(
                rng.choice(runs),
                operand(),
                rng.choice([None, operand()]),
                rng.choice([None, vector()]),
                self.number(),
                1e-5,
                operand(),
            ),
            lambda: program.gated(operand(64), "swiglu_clamped", operand()),
            lambda: program.copy(
                [operand(), operand()], operand(64), self.number(), rng.random() < 0.5
            ),
            lambda: program.rotate(table, rng.random() < 0.5, operand(), self.number(), operand()),
            lambda: program.scale_by_position(table.sum(axis=1), operand(), operand()),
            lambda: program.select_rows(operand(), self.slot()),
            lambda: program.embedding(self.weight(), self.number(), operand()),
        ]

    def product_calls(self) -> list[Callable[[], Any]]:
        rng, program, operand, weight = self.rng, self.program, self.operand, self.weight
        slot, bias, layer = self.slot, lambda: rng.choice([None, self.vector()]), self.layer

        def gated(num_matrices: int) -> Any:
            return weight(num_matrices, is_gated=True)

        return [
            lambda: program.pack(operand(), bias(), 1e-5, weight(), slot()),
            lambda: program.linear(
                slot(), weight(), bias(), rng.choice(["store", "logits"]), "silu", operand()
            ),
            lambda: program.linear(slot(), gated(1), None, "gated", "gelu", operand()),
            self.screen,
            lambda: program.gated_pack(slot(), gated(1), None, "silu", weight(), operand()),
            lambda: program.pack_heads(operand(64), weight(2), slot()),
            lambda: program.head_linear(slot(), weight(2), operand(64)),
            lambda: program.route(self.routing(), bias(), operand(), operand(4)),
            lambda: program.pack_experts(layer(), operand(), weight(2), slot()),
            lambda: program.gate_experts(
                layer(), slot(), gated(2), None, "silu", weight(2), slot()
            ),
            lambda: program.down_experts(layer(), slot(), weight(2), None, operand(64)),
            lambda: program.sum_experts(layer(), operand(64), operand()),
        ]

    def screen(self) -> None:
        """Of a weight, perhaps another one than the product's; x may lie where the result does."""
        kind, width = self.pick(["BF16"], ["F32", "Q8"]), self.pick([32], [33, 64, 1])
        weight = self.kernels.WeightPool().allocate(kind, False, width, 32, 1)
        screened = self.pick([weight], [self.weight()])
        screen = self.kernels.make_screen(self.team, screened)
        out = self.kernels.Operand(self.pick([3], [0]), self.pick([True], [False]), 32)
        self.program.screened_logits(self.pick([3], [0, -1]), weight, screen, out)

    def routing(self) -> Any:
        rng = self.rng
        return self.kernels.Routing(
            num_experts=self.pick([32], [1, 64, 0, 2**20]),
            num_choices=self.pick([2], [1, 16, 0, -1]),
            score=rng.choice(["softmax", "sigmoid", "softmax_of_chosen"]),
            is_normalised=rng.random() < 0.5,
            factor=1.0,
            num_groups=self.pick([1, 2], [0, 3]),
            num_chosen_groups=self.pick([1], [2, 5]),
            group_score=rng.choice(["max", "sum_of_two"]),
        )

    def other_calls(self) -> list[Callable[[], Any]]:
        program, library, weight = self.program, self.kernels, self.weight
        memory = library.LayerMemory(np.zeros(64, np.int8), 1, self.number() % 80)
        return [
            lambda: program.attend(self.number(), memory, 0, self.operand(), 0.0, None),
            lambda: program.run_segment(self.number()),
            lambda: program.view(self.operand()),
            lambda: weight().pack("F32", np.zeros((40, 128), np.uint8), self.number()),
            lambda: weight().pack("Q8_0", np.zeros((2, 34), np.uint8), self.number()),
            lambda: library.allocate_bytes(self.rng.choice([-1, 0, 1, 2**62])),
        ]

    def run(self) -> None:
        """A step over whatever has been accepted."""
        self.program.finish()
        batch = self.kernels.BatchArrays(
            token_ids=np.zeros(1, np.int64),
            positions=np.zeros(1, np.int64),
            logits_rows=np.zeros(1, np.int64),
            query_start=np.array([0, 1], np.int32),
            seq_lens=np.ones(1, np.int32),
            wants_best_only=self.rng.random() < 0.5,
        )
        if self.rng.random() < 0.5:
            self.program.start(batch, [])
            self.program.start(batch, [])
        self.program.begin(batch, [])
        self.program.run_segment(0)
        if self.rng.random() < 0.5:
            self.program.start(batch, [])  # and nobody waits for it


def build_badly(library: Any, team: Any, rng: random.Random) -> None:
    """A program of instructions that may or may not fit together; those that do are run."""
    builder = BadBuilder(library, team, rng)
    calls = [*builder.row_calls(), *builder.product_calls(), *builder.other_calls()]
    for _ in range(20):
        with contextlib.suppress(*REFUSALS):
            rng.choice(calls)()
    builder.run()


def main(seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    backend = make_backend()
    runner = NativeRunner(CONFIG, backend, rng.choice([DType.FLOAT32, DType.INT8]), sizes=SIZES)
    ids = [rng.randrange(CONFIG["vocab_size"]) for _ in range(40)]
    check = make_batch([Chunk(ids, np.arange(13, dtype=np.int32))], SIZES.block_size)
    expected = np.array(runner.forward(check))
    num_computed = num_refused = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            kind = rng.randrange(4)
            if kind == 0:
                build_badly(backend.kernels, backend.team, rng)
            elif kind == 3:
                late = late_tokens(rng)
                runner.executable.forward(valid_batch(rng), late)
                late.sampled_ids[:] = rng.choice(NUMBERS) % 2**31
                num_computed += 1
            else:
                make = valid_batch if kind == 1 else hostile_batch
                runner.forward(make(rng))
                num_computed += 1
        except REFUSALS:
            num_refused += 1
    # After all this a valid step still computes what it did.
    np.testing.assert_array_equal(runner.forward(check), expected)
    sys.stdout.write(f"{num_computed} {num_refused}\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
