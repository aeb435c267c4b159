"""Batches of fixed shapes on the native backend: cut tables, and tokens that fill a batch up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from native_runner import Chunk, NativeRunner, cut_tables, make_backend, make_batch, make_table
from tiny_families import ALL_CASES

SIZES = {"head_dim": 32, "max_position_embeddings": 1024}
LONG = {**ALL_CASES["llama_gqa"], **SIZES}
LOCAL = {
    "full": LONG,
    "window": {**ALL_CASES["gemma3_pattern"], **SIZES, "sliding_window": 41},
    "chunk": {**ALL_CASES["llama4"], **SIZES, "attention_chunk_size": 56},
}


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 48, count).tolist()


@pytest.mark.parametrize("kind", LOCAL)
def test_tables_may_begin_with_what_is_visible(kind: str) -> None:
    """Contexts of 1 to 3 splits of 256 keys, in blocks of 16; windows end within a block."""
    runner = NativeRunner(LOCAL[kind], make_backend())
    ids, table = random_ids(600), make_table(1)
    mate, mates_table = random_ids(90, 1), make_table(2, 64, 65)
    num_cut = 0
    for start, end in ((0, 300), (300, 301), (301, 560), (560, 600)):
        half = start * 90 // 600, end * 90 // 600
        chunks = [
            Chunk(ids[start:end], table, start),
            Chunk(mate[half[0] : half[1]], mates_table, half[0]),
        ]
        batch = runner.make_batch([chunk for chunk in chunks if chunk.token_ids])
        whole = np.array(runner.forward(batch))
        cut = cut_tables(batch, runner.group_specs)
        np.testing.assert_array_equal(runner.forward(cut), whole)
        num_cut += sum(int(group.first_columns.sum()) for group in cut.attention)
    assert (num_cut > 0) == (kind != "full")


def test_tokens_of_no_request_fill_a_batch_up() -> None:
    runner = NativeRunner(LONG, make_backend())
    batch = make_batch([Chunk(random_ids(5), make_table(1)), Chunk([7], make_table(2))], 16)
    expected = np.array(runner.forward(batch))
    kept = [np.array(layer.storage.raw) for layer in runner.model.attention_layers]
    (group,) = batch.attention
    padded = replace(
        batch,
        token_ids=np.append(batch.token_ids, [9, 9]),
        positions=np.append(batch.positions, [0, 3]),
        attention=[replace(group, slot_mapping=np.append(group.slot_mapping, [-1, -1]))],
    )
    np.testing.assert_array_equal(runner.forward(padded), expected)
    for layer, raw in zip(runner.model.attention_layers, kept, strict=True):
        np.testing.assert_array_equal(layer.storage.raw, raw)


def put(value: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda firsts: np.append(np.int32(value), firsts[1:])


HOSTILE = [put(-1), put(4), put(1 << 30), lambda firsts: firsts[:-1], lambda firsts: firsts[None]]


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_first_column_is_an_error(change: Callable[[np.ndarray], np.ndarray]) -> None:
    """The window of 41 before position 100 begins at 60, in column 3."""
    runner = NativeRunner(LOCAL["window"], make_backend())
    chunks = [Chunk([5], make_table(1), 100), Chunk([6, 7], make_table(2, 64, 65))]
    batch = cut_tables(runner.make_batch(chunks), runner.group_specs)
    expected = np.array(runner.forward(batch))
    groups = list(batch.attention)
    local = next(i for i, group in enumerate(groups) if group.first_columns.any())
    assert groups[local].first_columns.tolist() == [3, 0]
    groups[local] = replace(groups[local], first_columns=change(groups[local].first_columns))
    with pytest.raises((ValueError, TypeError), match=r"first_columns|incompatible"):
        runner.forward(replace(batch, attention=groups))
    np.testing.assert_array_equal(runner.forward(batch), expected)
