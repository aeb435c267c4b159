"""How layers that differ share one pool: the search for the layout that holds most requests.

All blocks of a pool weigh the same, whichever group takes them. A group is some layers of one type
and a block size of its own, so that groups of many and of few layers can both fill a block:

```
block bytes          | 15 window layers x 16 tokens |    | 3 full layers x 80 tokens |
```

Requests held = (blocks - block 0 - reserve) / sum over groups of a request's steady blocks, where
the reserve is the sum over groups of the transient blocks. `find_layout` takes the layouts that

1. hold at least 99% of the most that any layout holds, and what the caller asks for if any does,
2. and of these the fewest groups,
3. then the finest prefix hits: the smallest common multiple of the block sizes,
4. then the most requests, and the least bytes of a block.

Searched are all layouts of at most `MAX_GROUPS` groups whose block sizes have a common multiple of
at most `MAX_MULTIPLE` times the configured one and of `MAX_GRANULARITY` tokens: prefix hits are
multiples of it. The search leaves out only what cannot win:

* A block is as large as its largest group, so only the bytes of possible groups are tried.
* In a block of given bytes, a group with a given block size may have up to so many layers, and its
  cost does not depend on how many. So a type's groups are a cover of its layers by such capacities,
  and the cheapest cover by at most m groups follows from those by m - 1.
* A layout holds more than v requests if blocks - 1 - (reserve + v x steady) > 0, and that is a sum
  over groups: cheapest covers decide it exactly (Dinkelbach's method for ratios).
* No cover costs less than all layers at the lowest cost per layer, which is quick to see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvloom.errors import UnsupportedModelError
from kvloom.kv.cover import Choice, Items, JointCover
from kvloom.kv.spec import KVCacheSpec, KVLimits

MAX_GROUPS = 8
MAX_MULTIPLE = 16
MAX_GRANULARITY = 256  # tokens

_SHARE_OF_BEST = Fraction(99, 100)
_ROUNDING = 1e-9  # far above that of a sum of floats


@dataclass(frozen=True, slots=True)
class LayerType:
    """Layers that store alike, at the configured block size."""

    spec: KVCacheSpec
    num_layers: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group: how many layers of which type, in blocks of how many tokens."""

    layer_type: LayerType
    num_layers: int
    block_size: int

    @property
    def spec(self) -> KVCacheSpec:
        """How its layers store."""
        return replace(self.layer_type.spec, block_size=self.block_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of a block that its layers fill."""
        return self.num_layers * self.spec.page_size_bytes


@dataclass(frozen=True, slots=True)
class LayoutProblem:
    """The layers of a model, the memory for them, and the tokens of a request."""

    types: tuple[LayerType, ...]
    memory_bytes: int
    limits: KVLimits

    def requests_held(self, groups: Sequence[GroupShape]) -> Fraction:
        """Requests of full length that the memory holds; negative if not even the reserve fits."""
        num_blocks = self.memory_bytes // max(group.num_bytes for group in groups)
        reserve = sum(group.spec.num_transient_blocks(self.limits) for group in groups)
        stored = self.limits.max_stored_tokens
        steady = sum(group.spec.num_steady_blocks(stored) for group in groups)
        return Fraction(num_blocks - 1 - reserve, steady)


def find_layout(problem: LayoutProblem, at_least: Fraction = Fraction(0)) -> list[GroupShape]:
    """The layout by the rules above. It holds `at_least` requests if any layout does.

    Layers that are all of one type are one group in blocks of the configured size.

    Raises:
        UnsupportedModelError: more types of layers than there may be groups.
    """
    simplest = [GroupShape(t, t.num_layers, t.spec.block_size) for t in problem.types]
    if len(simplest) == 1:
        return simplest
    search = _Search(problem)
    most = search.most_requests(Fraction(0))
    if most is None:
        return simplest  # no layout leaves a block beside the reserve: this one is refused
    best = problem.requests_held(most)
    floor = max(_SHARE_OF_BEST * best, min(at_least, best), Fraction(best >= 1))
    return search.preferred(floor) or most


def deal(num_layers: int, capacities: Sequence[int]) -> list[int]:
    """To which of the groups each layer goes: they fill evenly, so any run of layers is spread."""
    counts = [0] * len(capacities)
    dealt = []
    for _ in range(num_layers):
        emptiest = min(range(len(counts)), key=lambda i: Fraction(counts[i] + 1, capacities[i]))
        counts[emptiest] += 1
        dealt.append(emptiest)
    return dealt


@dataclass(frozen=True, slots=True)
class _Option:
    """A block size of a type's groups, as a multiple of the configured one, and its costs."""

    multiple: int
    page_bytes: int
    num_steady: int
    num_transient: int


@dataclass(frozen=True, slots=True)
class _Block:
    """The bytes of a block, and the granularity of prefix hits, which block sizes divide.

    A granularity is a multiple of the configured block size.
    """

    granularity: int
    num_bytes: int


class _Search:
    """Which groups hold most, over the bytes of a block and the granularity of prefix hits."""

    def __init__(self, problem: LayoutProblem) -> None:
        if len(problem.types) > MAX_GROUPS:
            raise UnsupportedModelError(
                f"the model's layers store KV in {len(problem.types)} ways, but a pool has at most "
                f"{MAX_GROUPS} groups; choose a model whose layers differ less"
            )
        self._problem = problem
        base = problem.types[0].spec.block_size
        self._coarsest = min(MAX_MULTIPLE, max(MAX_GRANULARITY // base, 1))
        self._options = [self._options_of(layer_type) for layer_type in problem.types]

    def _options_of(self, layer_type: LayerType) -> list[_Option]:
        limits = self._problem.limits
        options = []
        for multiple in range(1, self._coarsest + 1):
            spec = replace(layer_type.spec, block_size=layer_type.spec.block_size * multiple)
            steady = spec.num_steady_blocks(limits.max_stored_tokens)
            transient = spec.num_transient_blocks(limits)
            options.append(_Option(multiple, spec.page_size_bytes, steady, transient))
        return options

    def most_requests(self, at_least: Fraction) -> list[GroupShape] | None:
        """The layout that holds most requests, None if that is less than `at_least`."""
        # Of two granularities that divide each other, the larger has the layouts of both.
        widest = range(self._coarsest // 2 + 1, self._coarsest + 1)
        blocks = (block for granularity in widest for block in self._blocks(granularity))
        return self._most_requests(blocks, MAX_GROUPS, at_least)

    def preferred(self, at_least: Fraction) -> list[GroupShape] | None:
        """Of the layouts that hold so many requests the best one by the rules of the module."""
        num_groups, granularity = MAX_GROUPS + 1, 0
        for candidate in range(1, self._coarsest + 1):
            for block in self._blocks(candidate):
                fewest = self._fewest_groups(block, num_groups - 1, at_least)
                if fewest is not None:
                    num_groups, granularity = fewest, candidate
        if not granularity:
            return None
        return self._most_requests(self._blocks(granularity), num_groups, at_least)

    def _blocks(self, granularity: int) -> list[_Block]:
        """Every block that some group of such a block size fills, the smallest first."""
        sizes = {
            num_layers * option.page_bytes
            for layer_type, options in zip(self._problem.types, self._options, strict=True)
            for option in options
            if granularity % option.multiple == 0
            for num_layers in range(1, layer_type.num_layers + 1)
        }
        return [_Block(granularity, num_bytes) for num_bytes in sorted(sizes)]

    def _most_requests(
        self, blocks: Iterable[_Block], max_groups: int, at_least: Fraction
    ) -> list[GroupShape] | None:
        best, held = None, at_least
        for block in blocks:
            while groups := self._more_requests(block, max_groups, held, best is not None):
                best, held = groups, self._problem.requests_held(groups)
        return best

    def _more_requests(
        self, block: _Block, max_groups: int, value: Fraction, strictly: bool
    ) -> list[GroupShape] | None:
        """Groups in such blocks that hold `value` requests or, strictly, more; None if none do."""
        cover, room = self._cover(block, max_groups, value)
        if cover is None:
            return None
        price = cover.price(max_groups)
        return self._groups(cover, max_groups) if price < room + (not strictly) else None

    def _fewest_groups(self, block: _Block, max_groups: int, at_least: Fraction) -> int | None:
        """The fewest groups in such blocks that hold so many requests; None if more are needed."""
        cover, room = self._cover(block, max_groups, at_least)
        if cover is None:
            return None
        enough = (n for n in range(1, max_groups + 1) if cover.price(n) <= room)
        return next(enough, None)

    def _cover(
        self, block: _Block, max_groups: int, value: Fraction
    ) -> tuple[JointCover | None, int]:
        """Groups at prices of reserve + value x steady, and the room there is for the price.

        Both are times the value's denominator. None if no groups can be so cheap.
        """
        types = [
            Items(layer_type.num_layers, self._choices(options, block, value))
            for layer_type, options in zip(self._problem.types, self._options, strict=True)
        ]
        num_blocks = self._problem.memory_bytes // block.num_bytes
        room = (num_blocks - 1) * value.denominator
        least = sum(items.lower_bound for items in types)
        cannot = least * (1 - _ROUNDING) > room  # a sum of floats; the rest is exact
        return (None if cannot else JointCover(types, max_groups)), room

    def _choices(self, options: list[_Option], block: _Block, value: Fraction) -> list[Choice]:
        numerator, denominator = value.numerator, value.denominator
        return [
            Choice(
                block.num_bytes // option.page_bytes,
                option.num_transient * denominator + option.num_steady * numerator,
                option.multiple,
            )
            for option in options
            if block.granularity % option.multiple == 0 and option.page_bytes <= block.num_bytes
        ]

    def _groups(self, cover: JointCover, num_groups: int) -> list[GroupShape]:
        """The layers of each type, dealt to its groups."""
        groups = []
        for layer_type, choices in zip(self._problem.types, cover.groups(num_groups), strict=True):
            counts = Counter(deal(layer_type.num_layers, [c.capacity for c in choices]))
            for i, choice in enumerate(choices):
                block_size = layer_type.spec.block_size * choice.label
                groups.append(GroupShape(layer_type, counts[i], block_size))
        return groups
