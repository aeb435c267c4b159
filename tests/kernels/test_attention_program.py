"""The instructions of an attention layer in a program: what they compute, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attention_twins import LOG2_E, Array, Scoring, Shape, attend, from_bf16, random_rows, to_bf16

NUM_TOKENS, MAX_MODEL_LEN, NUM_BLOCKS = 40, 128, 8
QKV, QUERIES, OUT = range(3)  # slots


class Program:
    """A program of one layer, over a pool of `stride` bytes per block."""

    def __init__(self, native: ModuleType, shape: Shape, stride: int) -> None:
        self.native, self.shape = native, shape
        sizes = native.ProgramSizes(
            max_num_tokens=NUM_TOKENS, max_num_rows=1, max_num_requests=1,
            max_model_len=MAX_MODEL_LEN,
        )  # fmt: skip
        out_width = shape.num_heads * shape.head_size_v
        widths = (shape.row_width, shape.num_heads * shape.head_size, out_width)
        slots = [native.SlotSpec(False, 4 * width) for width in widths]
        self.team = native.ThreadTeam(2)
        self.builder = native.Program(self.team, sizes, slots)
        self.raw = np.full(NUM_BLOCKS * stride, -1, np.int8)
        self.qkv = native.Operand(QKV, False, shape.row_width)
        self.out = native.Operand(OUT, False, out_width)

    def group(self, **changes: Any) -> int:
        """An attention group of the shape's layers."""
        shape = self.shape
        sizes = {
            "kv_format": shape.format, "block_size": shape.block_size,
            "num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads,
            "head_size": shape.head_size, "head_size_v": shape.head_size_v,
            "window": shape.window, "chunk": shape.chunk, "is_latent": shape.is_latent,
        }  # fmt: skip
        group = self.native.GroupShape(**sizes | changes)
        index: int = self.builder.attention_group(0, group, NUM_BLOCKS)
        return index

    def memory(self, offset_bytes: int = 0) -> Any:
        return self.native.LayerMemory(self.raw, NUM_BLOCKS, offset_bytes)

    def arrays(self, **changes: Any) -> Any:
        values = {
            "rotations": None, "q_norm": None, "k_norm": None, "norm_eps": 1e-6,
            "q_scale": self.shape.head_size**-0.5 * LOG2_E,
        }  # fmt: skip
        return self.native.QueryKeyArrays(**values | changes)

    def columns(self) -> list[Any]:
        """Of q, k and v, or of q and the row."""
        shape = self.shape
        firsts = np.cumsum([0, shape.num_heads * shape.head_size])
        if not shape.is_latent:
            firsts = np.append(firsts, firsts[1] + shape.num_kv_heads * shape.head_size)
        found = [self.native.Columns(QKV, int(first), shape.row_width) for first in firsts]
        return found if len(found) == 3 else [*found, None]

    def run(self, rows: Array, first_position: int) -> Array:
        """The result of tokens at positions from `first_position` on, in blocks 7, 6, 5, ..."""
        num_tokens = len(rows)
        positions = np.arange(first_position, first_position + num_tokens)
        table = np.arange(NUM_BLOCKS - 1, -1, -1, dtype=np.int32)[None]
        block_size = self.shape.block_size
        slots = table[0, positions // block_size] * block_size + positions % block_size
        batch = self.native.BatchArrays(
            token_ids=np.zeros(num_tokens, np.int64), positions=positions,
            logits_rows=np.array([0]), query_start=np.array([0, num_tokens], np.int32),
            seq_lens=np.array([first_position + num_tokens], np.int32),
        )  # fmt: skip
        group = self.native.GroupArrays(block_table=table, slots=slots.astype(np.int64))
        self.builder.begin(batch, [group])
        self.builder.view(self.qkv)[:] = rows
        self.builder.run_segment(0)
        out: Array = self.builder.view(self.out).copy()
        return out


SHAPES = [
    Shape("float32", 16, 2, 3, 32, 64, window=9),
    Shape("float32", 32, 1, 4, 64, 64, chunk=12),
    Shape("bfloat16", 16, 1, 5, 48, 32, is_latent=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_and_one_that_shares_its_kv_equal_the_definition(
    native: ModuleType, shape: Shape
) -> None:
    """The layers lie behind something else in their blocks; the second one has sinks and a cap."""
    program = Program(native, shape, stride=shape.layer(native).block_bytes + 256)
    group, memory = program.group(), program.memory(offset_bytes=128)
    q, k, v = program.columns()
    program.builder.store_qkv(group, memory, program.arrays(), q, k, v, QUERIES)
    sinks = np.linspace(-2, 3, shape.num_heads, dtype=np.float32)
    program.builder.store_qkv(group, memory, program.arrays(), q, None, None, QUERIES)
    program.builder.attend(group, memory, QUERIES, program.out, 2.5, sinks)
    program.builder.finish()
    (rows,) = random_rows(shape, [60])
    out = np.concatenate([program.run(rows[:33], 0), program.run(rows[33:], 33)])
    num_q = shape.num_heads * shape.head_size
    num_k = shape.num_kv_heads * shape.head_size
    round_stored = from_bf16_of if shape.format == "bfloat16" else np.asarray
    queries = rows[:, :num_q].reshape(60, -1, shape.head_size) * np.float32(
        shape.head_size**-0.5 * LOG2_E
    )
    keys = round_stored(rows[:, num_q : num_q + num_k]).reshape(60, -1, shape.head_size)
    values = keys[:, :, : shape.head_size_v]
    if not shape.is_latent:
        values = rows[:, num_q + num_k :].reshape(60, -1, shape.head_size_v)
    want = attend(shape, round_stored(queries), keys, values, 0, Scoring(2.5, sinks))
    assert np.abs(out - want).max() <= (6e-3 if shape.format == "bfloat16" else 4e-6)
    blocks = program.raw.reshape(NUM_BLOCKS, -1)
    assert np.all(blocks[:, :128] == -1)
    assert np.all(blocks[:, -128:] == -1)


def from_bf16_of(x: Array) -> Array:
    """Rounded to bfloat16."""
    return from_bf16(to_bf16(x))


def test_what_does_not_fit_is_refused(native: ModuleType) -> None:
    shape = Shape("float32", 16, 2, 2, 32, 32)
    stride = shape.layer(native).block_bytes + 64
    program = Program(native, shape, stride)
    group, memory, arrays = program.group(), program.memory(), program.arrays()
    q, k, v = program.columns()
    columns, floats = native.Columns, np.zeros
    builder = program.builder
    narrow = native.Operand(OUT, False, 64)

    def store(*arguments: Any) -> None:
        builder.store_qkv(*arguments, QUERIES)

    refused: list[Callable[[], object]] = [
        lambda: program.group(window=-1),
        lambda: program.group(window=4, chunk=4),
        lambda: program.group(is_latent=True),
        lambda: program.group(kv_format="int8", is_latent=True, num_kv_heads=1),
        lambda: program.group(head_size=528),
        lambda: program.memory(-1),
        lambda: store(group, program.memory(65), arrays, q, k, v),
        lambda: store(group, program.memory(2**62), arrays, q, k, v),
        lambda: store(group, memory, arrays, q, k, None),
        lambda: store(group, memory, arrays, q, None, v),
        lambda: store(group + 1, memory, arrays, q, k, v),
        lambda: store(group, memory, arrays, columns(QKV, 129, 256), k, v),
        lambda: store(group, memory, arrays, columns(QKV, -1, 256), k, v),
        lambda: store(group, memory, arrays, columns(QKV, 0, 2**31 - 1), k, v),
        lambda: store(group, memory, arrays, columns(9, 0, 256), k, v),
        lambda: store(group, memory, arrays, q, columns(QKV, 193, 256), v),
        lambda: store(group, memory, program.arrays(q_norm=floats(31, np.float32)), q, k, v),
        lambda: store(group, memory, program.arrays(v_norm=floats(33, np.float32)), q, k, v),
        lambda: store(group, memory, program.arrays(rotations=floats((9, 34), "f")), q, k, v),
        lambda: store(group, memory, program.arrays(rotations=floats((0, 2), "f")), q, k, v),
        lambda: store(group, memory, program.arrays(position_scales=floats(0, "f")), q, k, v),
        lambda: builder.attend(group, memory, QUERIES, narrow, 0.0, None),
        lambda: builder.attend(group, memory, QUERIES, program.out, -1.0, None),
        lambda: builder.attend(group, memory, QUERIES, program.out, 0.0, floats(3, np.float32)),
        lambda: builder.attend(group, program.memory(65), QUERIES, program.out, 0.0, None),
    ]
    for attempt in refused:
        with pytest.raises(ValueError, match=r"[a-z]"):
            attempt()


def test_positions_beyond_a_table_are_refused(native: ModuleType) -> None:
    shape = Shape("float32", 16, 1, 1, 32, 32)
    tables = ({"rotations": np.zeros((20, 8), np.float32)}, {"position_scales": np.ones(20, "f")})
    for table in tables:
        program = Program(native, shape, shape.layer(native).block_bytes)
        arrays = program.arrays(**table)
        program.builder.store_qkv(
            program.group(), program.memory(), arrays, *program.columns(), QUERIES
        )
        program.builder.finish()
        program.run(random_rows(shape, [5])[0], 15)
        with pytest.raises(ValueError, match="positions"):
            program.run(random_rows(shape, [6])[0], 15)
