"""The native backend: the reference's logits, the same bits whatever shares a step, no crash."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvloom.dtypes import DType
from kvloom.errors import ConfigError, UnsupportedModelError, WeightsError
from kvloom.kv.spec import FullAttentionSpec
from kvloom.ops.backend import StepSizes
from kvloom.ops.base import Batch
from kvloom.ops.isa import built_isas, can_run
from kvloom.ops.reference import ReferenceBackend
from kvloom.ops.tape import Operation
from kvloom.runner.collectives import SingleRankCommunicator
from native_runner import (
    NUM_BLOCKS,
    SIZES,
    Chunk,
    NativeRunner,
    make_backend,
    make_batch,
    make_table,
)
from tiny_models import CASES, TinyRunner, build_loaded, make_token_ids, run_ranks

# The kernels take heads of 16 and more.
CONFIGS = {case: {**config, "head_dim": 16} for case, config in CASES.items()}
LONG = {**CASES["llama_gqa"], "head_dim": 32, "max_position_embeddings": 1024}


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 48, count).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference(case: str) -> None:
    reference = ReferenceBackend()
    ids = make_token_ids(case)
    expected = TinyRunner(build_loaded(CONFIGS[case], reference), reference, 16).step(ids)
    sizes = replace(SIZES, max_model_len=64)
    runner = NativeRunner(CONFIGS[case], make_backend(), sizes=sizes)
    table, chunks = make_table(1, 4), [ids[:10], ids[10:11], ids[11:]]
    computed = [0, 10, 11]
    steps = [runner.step([Chunk(c, table, n)])[0] for c, n in zip(chunks, computed, strict=True)]
    np.testing.assert_allclose(np.concatenate(steps), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("packed", "tolerance"), [("F32", 1e-4), ("BF16", 0.1)])
@pytest.mark.parametrize("isa", [isa for isa in built_isas() if can_run(isa)])
def test_every_instruction_set_runs_the_model(
    isa: str, packed: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOM_ISA", isa)
    ids = make_token_ids("qwen3_tied")
    reference = ReferenceBackend()
    config = {**CONFIGS["qwen3_tied"], "head_dim": 32}
    expected = TinyRunner(build_loaded(config, reference), reference, 16).step(ids)
    kv_dtype = DType.FLOAT32 if packed == "F32" else DType.BFLOAT16
    sizes = replace(SIZES, max_model_len=64)
    runner = NativeRunner(config, make_backend(), kv_dtype, packed, sizes=sizes)
    [logits] = runner.step([Chunk(ids, make_table(1, 4))])
    # BF16 keeps 8 bits: errors are measured against the spread of the logits.
    assert np.abs(logits - expected).max() < tolerance * expected.std()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_the_reference(world_size: int) -> None:
    case = "llama_mha_biases"
    reference, ids = ReferenceBackend(), make_token_ids(case)
    expected = TinyRunner(build_loaded(CONFIGS[case], reference), reference, 16).step(ids)
    make_backend()  # skips here rather than in a thread
    sizes = replace(SIZES, max_model_len=64)

    def work(rank: Any, communicator: Any) -> np.ndarray:
        runner = NativeRunner(
            CONFIGS[case], make_backend(1), rank=rank, communicator=communicator, sizes=sizes
        )
        table = make_table(1, 4)
        return np.concatenate(
            [runner.step([Chunk(ids[:9], table)])[0], runner.step([Chunk(ids[9:], table, 9)])[0]]
        )

    for logits in run_ranks(world_size, work):
        assert isinstance(logits, np.ndarray), logits
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


FORMATS = [("F32", DType.FLOAT32), ("BF16", DType.BFLOAT16)]


@pytest.mark.parametrize(("packed", "kv_dtype"), FORMATS)
def test_logits_do_not_depend_on_chunks_or_batch_mates(packed: str, kv_dtype: DType) -> None:
    ids, table = random_ids(600), make_table(1)
    backend = make_backend()

    def runner() -> NativeRunner:
        return NativeRunner(LONG, backend, kv_dtype, packed)

    [whole] = runner().step([Chunk(ids, table)])
    for sizes in ([1, 255, 1, 100, 243], [300, 300], [16] * 37 + [8]):
        chunked, starts = runner(), [0, *itertools.accumulate(sizes)]
        parts = [
            chunked.step([Chunk(ids[a:b], table, a)])[0] for a, b in itertools.pairwise(starts)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    together = runner()
    mates = [Chunk(random_ids(n, n), make_table(n, 64, 65)) for n in (1, 65, 300)]
    [first, *_] = together.step([Chunk(ids[:400], table), *mates[:1]])
    np.testing.assert_array_equal(first, whole[:400])
    *_, last = together.step([*mates[1:], Chunk(ids[400:], table, 400)])
    np.testing.assert_array_equal(last, whole[400:])


@pytest.mark.parametrize(("packed", "kv_dtype"), FORMATS)
def test_a_hit_prefix_changes_no_bit(packed: str, kv_dtype: DType) -> None:
    ids, table = random_ids(400), make_table(1)
    runner = NativeRunner(LONG, make_backend(), kv_dtype, packed)
    [whole] = runner.step([Chunk(ids, table)])
    # Another request shares the first 12 blocks and has the rest to itself.
    other = np.concatenate((table[:12], make_table(2, 52, 100))).astype(np.int32)
    [rest] = runner.step([Chunk(ids[192:], other, 192)])
    np.testing.assert_array_equal(rest, whole[192:])


def test_some_rows_are_those_rows_of_all() -> None:
    ids, table = random_ids(50), make_table(1)
    runner = NativeRunner(LONG, make_backend())
    batch = make_batch([Chunk(ids, table)], 16)
    every = np.array(runner.forward(batch))
    some = runner.forward(replace(batch, logits_rows=np.array([49, 3, 3])))
    np.testing.assert_array_equal(some, every[[49, 3, 3]])
    none = runner.forward(replace(batch, logits_rows=np.zeros(0, np.int64)))
    assert none.shape == (0, 48)


def test_copied_blocks_are_read_like_the_first_ones() -> None:
    ids, table = random_ids(40), make_table(1)
    runner = NativeRunner(LONG, make_backend())
    [whole] = runner.step([Chunk(ids, table)])
    copies = [(int(block), int(block) + 100) for block in table[:3]]
    for layer in runner.model.attention_layers:
        runner.backend.copy_blocks(layer.storage, copies)
    [again] = runner.step([Chunk(ids[-1:], table + np.int32(100), 39)])
    np.testing.assert_array_equal(again[0], whole[-1])


def break_batch(batch: Batch, name: str, change: Callable[[np.ndarray], Any]) -> Batch:
    metadata = batch.attention[0]
    if hasattr(metadata, name):
        array = np.array(getattr(metadata, name))
        changed = replace(metadata, **{name: change(array)})
        return replace(batch, attention=[changed])
    return replace(batch, **{name: change(np.array(getattr(batch, name)))})


def put(value: int, at: Any = 0) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[at] = value
        return array

    return change


HOSTILE: list[tuple[str, Callable[[np.ndarray], Any]]] = [
    ("token_ids", put(-1)),
    ("token_ids", put(1 << 40)),
    ("token_ids", lambda a: a[:-1]),
    ("positions", put(-1)),
    ("positions", put(SIZES.max_model_len)),
    ("positions", lambda a: a[:-1]),
    ("logits_rows", put(-1)),
    ("logits_rows", put(1 << 33)),
    ("query_start", put(1)),
    ("query_start", put(-5, 1)),
    ("query_start", put(1 << 30, -1)),
    ("query_start", lambda a: a[:-1]),
    ("seq_lens", put(0)),
    ("seq_lens", put(2_000_000_000)),
    ("seq_lens", lambda a: a[:-1]),
    ("block_table", put(-1, (0, 0))),
    ("block_table", put(NUM_BLOCKS, (0, 0))),
    ("block_table", lambda a: a[:, :1]),
    ("block_table", lambda a: a[:1]),
    ("slot_mapping", put(-2)),
    ("slot_mapping", put(NUM_BLOCKS * 16)),
    ("slot_mapping", lambda a: a[:-1]),
]


def test_a_finished_program_takes_nothing_more():
    """Steps know what there was when it was finished."""
    backend = make_backend()
    kernels = backend.kernels
    sizes = kernels.ProgramSizes(
        max_num_tokens=8, max_num_rows=8, max_num_requests=2, max_model_len=64
    )
    program = kernels.Program(backend.team, sizes, [kernels.SlotSpec(False, 128)])
    program.finish()
    shape = kernels.GroupShape(
        kv_format="f32",
        block_size=16,
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        head_size_v=16,
    )
    operand = kernels.Operand(0, False, 32)
    for call in (
        program.finish,
        program.end_segment,
        lambda: program.attention_group(0, shape, 4),
        lambda: program.map_number("add", operand, 1.0, operand),
    ):
        with pytest.raises(ValueError, match="the program is finished"):
            call()


@pytest.mark.parametrize(("name", "change"), HOSTILE)
def test_hostile_metadata_is_an_error(name: str, change: Callable[[np.ndarray], Any]) -> None:
    runner = NativeRunner(LONG, make_backend())
    chunks = [Chunk(random_ids(40), make_table(1)), Chunk(random_ids(3), make_table(2, 64, 65))]
    batch = make_batch(chunks, 16)
    expected = np.array(runner.forward(batch))
    with pytest.raises(ValueError, match=f"^({'|'.join({name for name, _ in HOSTILE})}):"):
        runner.forward(break_batch(batch, name, change))
    # The next step is none the worse for it.
    np.testing.assert_array_equal(runner.forward(batch), expected)


def test_wrong_types_are_an_error() -> None:
    runner = NativeRunner(LONG, make_backend())
    batch = make_batch([Chunk(random_ids(4), make_table(1))], 16)
    wrong = (None, "tokens", np.zeros((2, 2), np.int64), np.zeros(4), np.zeros(4, np.int32))
    for token_ids in (*wrong, np.zeros(8, np.int64)[::2]):
        with pytest.raises(TypeError):
            runner.forward(replace(batch, token_ids=token_ids))


def test_an_id_outside_the_vocabulary_embeds_as_zeros() -> None:
    # The reference defines it so; which ids a request may hold is checked where it is made.
    runner = NativeRunner(LONG, make_backend())
    [logits] = runner.step([Chunk([48], make_table(1))])
    assert np.isfinite(logits).all()


def test_a_step_beyond_the_sizes_is_an_error() -> None:
    sizes = StepSizes(
        max_num_tokens=8, max_num_reqs=1, max_num_rows=2, max_model_len=64, block_size=16
    )
    runner = NativeRunner(CONFIGS["llama_gqa"], make_backend(), sizes=sizes)
    with pytest.raises(ValueError, match="tokens"):
        runner.step([Chunk(random_ids(9), make_table(1, 4))])
    with pytest.raises(ValueError, match="requests"):
        runner.step([Chunk([1], make_table(n, 4)) for n in (1, 2)])
    with pytest.raises(ValueError, match="rows of logits"):
        runner.step([Chunk(random_ids(3), make_table(1, 4))])
    assert runner.step([Chunk(random_ids(2), make_table(1, 4))])[0].shape == (2, 48)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"block_size": 8}, "multiples of 16"),
        ({"head_size": 8}, "heads"),
        ({"head_size_v": 1024}, "heads"),
        ({"dtype": DType.FLOAT16}, "float16"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(spec: dict[str, Any], words: str) -> None:
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": DType.FLOAT32}
    made = FullAttentionSpec(**(fields | spec))
    backend = make_backend()
    raw = backend.allocate_kv(made.page_size_bytes * 2)
    with pytest.raises(ConfigError, match=words):
        backend.view_kv(raw, made, 2)


def test_memory_that_is_too_small_is_refused() -> None:
    backend = make_backend()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=DType.FLOAT32)
    with pytest.raises(ConfigError, match="do not hold"):
        backend.view_kv(backend.allocate_kv(spec.page_size_bytes), spec, 2)


def test_a_weight_of_another_shape_is_refused() -> None:
    backend = make_backend()
    model = NativeRunner(LONG, backend).model
    matrix = next(p for p in model.parameters if len(p.shape) == 2)
    with pytest.raises(WeightsError, match=matrix.name):
        backend.pack(matrix, np.zeros((3, 2)))


def test_an_operation_nothing_computes_is_refused() -> None:
    class Model:
        def forward(self, ops: Any, batch: Batch) -> Any:
            x = ops.embedding(batch.token_ids, table)
            ops.operations.append(Operation("convolve", (x,), (x,)))
            return x

    backend = make_backend()
    table = NativeRunner(LONG, backend).model.parameters[0]
    with pytest.raises(UnsupportedModelError, match="convolve"):
        backend.compile(Model(), SingleRankCommunicator(), SIZES)


def test_activation_bytes_grow_with_the_sizes_and_not_with_layers() -> None:
    backend = make_backend()
    base = NativeRunner(LONG, backend).executable.activation_bytes
    deep = NativeRunner({**LONG, "num_hidden_layers": 4}, backend).executable.activation_bytes
    wide = NativeRunner(LONG, backend, sizes=replace(SIZES, max_num_tokens=2048))
    assert base == deep
    # At least the residual (hidden 32) and one product of 2 x 40 columns in float32.
    assert wide.executable.activation_bytes - base >= 1024 * (32 + 40) * 4
    few_rows = NativeRunner(LONG, backend, sizes=replace(SIZES, max_num_rows=24))
    assert base - few_rows.executable.activation_bytes >= 1000 * 48 * 4  # logits of 48 tokens
