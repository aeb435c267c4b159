"""Feeds random and hostile calls to the native program; run as a script, since it may crash.

    python native_fuzz.py SECONDS SEED

Prints how many steps were computed and how many calls were refused.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from kvloom.dtypes import DType
from kvloom.ops.base import AttentionMetadata, Batch, StepSizes
from native_runner import NUM_BLOCKS, Chunk, NativeRunner, make_backend, make_batch
from tiny_models import CASES

CONFIG = {**CASES["llama_mha_biases"], "head_dim": 32, "max_position_embeddings": 200}
SIZES = StepSizes(max_num_tokens=96, max_num_reqs=4, max_model_len=200, block_size=16)
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
    return make_batch(chunks, SIZES.block_size)


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


def build_badly(library: Any, team: Any, rng: random.Random) -> None:
    """A program of instructions that may or may not fit together."""

    def number() -> int:
        return rng.choice((*NUMBERS, 32, 64, 3))

    def operand() -> Any:
        return library.Operand(rng.randint(-1, 3), rng.random() < 0.3, rng.choice([1, 32, 64, -1]))

    slots = [library.SlotSpec(i == 2, rng.choice([0, 128, 256, 4096])) for i in range(3)]
    sizes = {
        f"max_num_{name}": rng.choice([1, 8, 0, -1]) for name in ("tokens", "rows", "requests")
    }
    made = library.ProgramSizes(**sizes, max_model_len=rng.choice([64, 0, 2**40]))
    program = library.Program(team, made, slots)
    weight = library.WeightPool().allocate(
        rng.choice(["F32", "BF16", "Q8", "Q4"]), rng.random() < 0.3, rng.choice([32, 64, 33]), 32
    )
    vector = np.ones(rng.choice([1, 32, 64]), np.float32)
    calls: list[Callable[[], Any]] = [
        lambda: program.embedding(weight, number(), operand()),
        lambda: program.rms_norm(vector, 1e-5, operand(), operand()),
        lambda: program.pack(operand(), rng.choice([None, vector]), 1e-5, weight, number()),
        lambda: program.linear(number(), weight, vector, "store", "silu", operand()),
        lambda: program.linear(1, weight, None, rng.choice(["add", "gated"]), "gelu", operand()),
        lambda: program.gated_pack(1, weight, None, "silu", weight, operand()),
        lambda: program.add(number(), 0, operand()),
        lambda: program.select_rows(operand(), number()),
        lambda: program.attend(
            number(), library.LayerMemory(np.zeros(64, np.int8), 1), 0, operand()
        ),
        lambda: program.run_segment(number()),
        lambda: program.view(operand()),
        lambda: weight.pack("F32", np.zeros((rng.randint(0, 40), 128), np.uint8), number()),
        lambda: weight.pack("Q8_0", np.zeros((2, 34), np.uint8), rng.randint(-1, 40)),
        lambda: library.allocate_bytes(rng.choice([-1, 0, 1, 2**62])),
    ]
    rng.choice(calls)()


def main(seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    backend = make_backend()
    runner = NativeRunner(CONFIG, backend, rng.choice([DType.FLOAT32, DType.INT8]), sizes=SIZES)
    ids = [rng.randrange(CONFIG["vocab_size"]) for _ in range(40)]
    check = make_batch([Chunk(ids, np.arange(13, dtype=np.int32))], SIZES.block_size)
    expected = np.array(runner.executable.forward(check))
    num_computed = num_refused = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            kind = rng.randrange(3)
            if kind == 0:
                build_badly(backend.library, backend.team, rng)
            else:
                make = valid_batch if kind == 1 else hostile_batch
                runner.executable.forward(make(rng))
                num_computed += 1
        except REFUSALS:
            num_refused += 1
    # After all this a valid step still computes what it did.
    np.testing.assert_array_equal(runner.executable.forward(check), expected)
    sys.stdout.write(f"{num_computed} {num_refused}\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
