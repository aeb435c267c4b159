"""The layout search against all layouts there are, tried one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations_with_replacement, product
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config_specs import layer_specs
from kvloom.dtypes import DType
from kvloom.errors import UnsupportedModelError
from kvloom.kv.layout import GroupShape, LayerType, LayoutProblem, deal, find_layout
from kvloom.kv.planner import make_kv_cache_spec
from kvloom.kv.spec import KVCacheSpec, KVLimits, LayerSpec

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"


def spec(
    num_kv_heads: int = 1, window: int | None = None, chunk: int | None = None, block_size: int = 16
) -> KVCacheSpec:
    return make_kv_cache_spec(
        LayerSpec("x", num_kv_heads, 8, DType.BFLOAT16, window, chunk), block_size
    )


def partitions(num_layers: int, at_most: int) -> Iterator[tuple[int, ...]]:
    """Numbers of layers of groups, the largest first."""
    if num_layers == 0:
        yield ()
    for first in range(min(num_layers, at_most), 0, -1):
        for rest in partitions(num_layers - first, first):
            yield (first, *rest)


@cache
def layouts_of_type(layer_type: LayerType, largest_multiple: int) -> list[tuple[GroupShape, ...]]:
    base = layer_type.spec.block_size
    groups = [
        GroupShape(layer_type, num_layers, base * multiple)
        for num_layers in range(1, layer_type.num_layers + 1)
        for multiple in range(1, largest_multiple + 1)
    ]
    return [
        layout
        for num_groups in range(1, min(layer_type.num_layers, 8) + 1)
        for layout in combinations_with_replacement(groups, num_groups)
        if sum(group.num_layers for group in layout) == layer_type.num_layers
    ]


def all_layouts(problem: LayoutProblem) -> Iterator[list[GroupShape]]:
    """At most 8 groups, a common multiple of block sizes of at most 16 and of 256 tokens."""
    base = problem.types[0].spec.block_size
    largest = min(16, max(256 // base, 1))
    for choice in product(*(layouts_of_type(t, largest) for t in problem.types)):
        groups = [group for of_type in choice for group in of_type]
        if len(groups) <= 8 and hit_step(groups) <= largest * base:
            yield groups


def hit_step(groups: Sequence[GroupShape]) -> int:
    return lcm(*(group.block_size for group in groups))


class Costs:
    """What groups cost, by the specs' own count; each asked once."""

    def __init__(self, problem: LayoutProblem) -> None:
        self._problem = problem
        self._costs: dict[GroupShape, tuple[int, int, int]] = {}

    def of(self, group: GroupShape) -> tuple[int, int, int]:
        if group not in self._costs:
            limits = self._problem.limits
            steady = group.spec.num_steady_blocks(limits.max_model_len - 1)
            most = group.spec.max_num_blocks(limits.max_model_len - 1, limits)
            self._costs[group] = (group.num_bytes, steady, most - steady)
        return self._costs[group]

    def requests_held(self, groups: Sequence[GroupShape]) -> Fraction:
        sizes, steady, transient = zip(*map(self.of, groups), strict=True)
        num_blocks = self._problem.memory_bytes // max(sizes)
        return Fraction(num_blocks - 1 - sum(transient), sum(steady))


def rank(groups: Sequence[GroupShape], held: Fraction) -> tuple[int, int, Fraction, int]:
    """The rules after the first one; the least is best."""
    return len(groups), hit_step(groups), -held, max(group.num_bytes for group in groups)


heads = st.integers(1, 3)
kinds = st.one_of(
    st.tuples(heads, st.none(), st.none()),
    st.tuples(heads, st.integers(1, 200), st.none()),
    st.tuples(heads, st.none(), st.integers(1, 200)),
)


@st.composite
def problems(draw) -> LayoutProblem:
    base, most_layers = draw(st.sampled_from([(16, 2), (64, 4), (128, 5), (256, 6)]))
    num_types = draw(st.integers(2, 3 if base > 64 else 2))
    chosen = draw(st.lists(kinds, min_size=num_types, max_size=num_types, unique=True))
    types = tuple(
        LayerType(spec(*kind, block_size=base), draw(st.integers(1, most_layers)))
        for kind in chosen
    )
    page_bytes = base * 32
    memory_bytes = page_bytes * draw(st.integers(10, 3000))
    return LayoutProblem(
        types, memory_bytes, KVLimits(draw(st.integers(2, 3000)), draw(st.integers(1, 600)))
    )


@settings(max_examples=60)
@given(problem=problems(), share=st.sampled_from([Fraction(0), Fraction(199, 200), Fraction(1)]))
def test_the_layout_is_the_best_of_all(problem, share):
    costs = Costs(problem)
    tried = [(groups, costs.requests_held(groups)) for groups in all_layouts(problem)]
    best = max(held for _, held in tried)
    found = find_layout(problem, at_least=best * share)
    held = costs.requests_held(found)
    for layer_type in problem.types:
        sizes = [group.num_layers for group in found if group.layer_type == layer_type]
        assert sum(sizes) == layer_type.num_layers
        assert min(sizes) >= 1
    assert problem.requests_held(found) == held
    if best < 0:
        return  # no layout leaves room beside its reserve: any is refused
    floor = max(best * Fraction(99, 100), best * share, Fraction(best >= 1))
    assert held >= floor
    assert rank(found, held) == min(rank(groups, h) for groups, h in tried if h >= floor)


def test_gemma_3_270m_at_4096_tokens():
    """3 full and 15 window layers of one page: 3 x 80 tokens fill what 15 x 16 do.

    A request holds cdiv(4095, 80) + cdiv(511, 16) + 1 blocks; chunks of 2,048 tokens take
    cdiv(511 + 2047, 16) - 32 more, once.
    """
    full, window = LayerType(spec(), 3), LayerType(spec(window=512), 15)
    problem = LayoutProblem((window, full), 15 * 512 * 10_000, KVLimits(4096, 2048))
    assert find_layout(problem) == [GroupShape(window, 15, 16), GroupShape(full, 3, 80)]
    assert problem.requests_held(find_layout(problem)) == Fraction(9999 - 128, 52 + 33)


def test_a_layout_that_one_percent_makes_too_small_is_not_taken():
    """Two groups hold 53.22 requests of Llama 4, three hold 53.33."""
    full, chunks = LayerType(spec(8), 12), LayerType(spec(8, chunk=8192), 36)
    problem = LayoutProblem((chunks, full), 48 * 4096 * 13_653, KVLimits(4096, 2048))
    assert [group.num_layers for group in find_layout(problem)] == [36, 12]
    asked = Fraction(5333, 100)
    assert problem.requests_held(find_layout(problem)) < asked
    three = find_layout(problem, at_least=asked)
    assert len(three) == 3
    assert problem.requests_held(three) >= asked


def test_layers_of_one_type_are_one_group():
    for only in (spec(), spec(window=5), spec(chunk=7)):
        layer_type = LayerType(only, 7)
        for memory_bytes in (0, 512 * 20, 512 * 7000):
            problem = LayoutProblem((layer_type,), memory_bytes, KVLimits(300, 64))
            assert find_layout(problem) == [GroupShape(layer_type, 7, 16)]


def test_more_types_than_groups_are_refused():
    types = tuple(LayerType(spec(heads), 2) for heads in range(1, 10))
    limits = KVLimits(300, 64)
    assert len(find_layout(LayoutProblem(types[:8], 1 << 20, limits))) == 8
    with pytest.raises(UnsupportedModelError, match="9 ways"):
        find_layout(LayoutProblem(types, 1 << 20, limits))


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_real_models_have_at_most_eight_groups_of_whole_hits(config):
    types: dict[KVCacheSpec, int] = {}
    for layer in layer_specs(json.loads(config.read_text())):
        if layer.shares_kv_with is None:
            of_layer = make_kv_cache_spec(layer, 16)
            types[of_layer] = types.get(of_layer, 0) + 1
    problem = LayoutProblem(
        tuple(LayerType(*item) for item in types.items()), 40 << 30, KVLimits(131_072, 2048)
    )
    groups = find_layout(problem)
    assert len(types) <= len(groups) <= 8
    assert hit_step(groups) <= 256
    assert all(group.block_size % 16 == 0 for group in groups)


@given(capacities=st.lists(st.integers(1, 9), min_size=1, max_size=5), data=st.data())
def test_dealt_layers_fit_and_spread(capacities, data):
    num_layers = data.draw(st.integers(0, sum(capacities)))
    dealt = deal(num_layers, capacities)
    counts = [dealt.count(i) for i in range(len(capacities))]
    assert len(dealt) == num_layers
    fill = [Fraction(count, capacity) for count, capacity in zip(counts, capacities, strict=True)]
    assert all(f <= 1 for f in fill)
    for i, capacity in enumerate(capacities):  # no layer would be better off in another group
        assert Fraction(counts[i] + 1, capacity) >= max(fill)
