"""Cheapest covers: items of several types, each type covered by groups that have room and a price.

The planner's layers are the items. A group may take up to `capacity` items and costs the same
whatever it takes. How cheaply n items are covered by at most m groups follows from m - 1:

```
rows[m][n] = min over choices of  price + rows[m - 1][n - capacity]
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of group: the items it may take, its price, and what it stands for."""

    capacity: int
    price: int
    label: int


@dataclass(frozen=True, slots=True)
class Items:
    """The items of one type, and the kinds of groups that may take them."""

    num_items: int
    choices: Sequence[Choice]

    @property
    def lower_bound(self) -> float:
        """No cover is cheaper: each item pays at least the lowest price per item."""
        return min(
            (c.price * max(self.num_items / c.capacity, 1.0) for c in self.choices), default=inf
        )


class Cover:
    """Cheapest groups for items of one type, for every number of groups up to `max_groups`."""

    def __init__(self, items: Items, max_groups: int) -> None:
        self._items = items
        self.max_groups = max_groups
        self._rows: list[list[float]] = [[0, *[inf] * items.num_items]]
        for _ in range(max_groups):
            self._rows.append(self._next_row(self._rows[-1]))

    def _next_row(self, row: list[float]) -> list[float]:
        best = row
        for choice in self._items.choices:
            price = choice.price
            rest = [row[0]] * choice.capacity + row  # zip drops what is beyond the items
            best = [p if (p := price + r) < b else b for b, r in zip(best, rest, strict=False)]
        return best

    def price(self, num_groups: int) -> float:
        """The least price of at most so many groups; infinite if they cannot cover."""
        return self._rows[num_groups][-1]

    def groups(self, num_groups: int) -> list[Choice]:
        """At most so many groups of that price."""
        left, groups = self._items.num_items, []
        for num in range(num_groups, 0, -1):
            row, fewer = self._rows[num], self._rows[num - 1]
            if fewer[left] > row[left]:
                groups.append(self._last_choice(fewer, left, row[left]))
                left = max(left - groups[-1].capacity, 0)
        return groups

    def _last_choice(self, fewer: list[float], left: int, price: float) -> Choice:
        return next(
            choice
            for choice in self._items.choices
            if choice.price + fewer[max(left - choice.capacity, 0)] == price
        )


class JointCover:
    """Cheapest groups for items of several types, at most `max_groups` in all."""

    def __init__(self, types: Sequence[Items], max_groups: int) -> None:
        most = max(max_groups - len(types) + 1, 0)  # as every type has a group
        self._covers = [Cover(items, most) for items in types]
        # prices[t][g]: the least price of the first t types in at most g groups
        self._prices: list[list[float]] = [[0] * (max_groups + 1)]
        for cover in self._covers:
            fewer = self._prices[-1]
            splits = (self._best_split(cover, fewer, num) for num in range(max_groups + 1))
            self._prices.append([price for price, _ in splits])

    def _best_split(self, cover: Cover, fewer: list[float], num: int) -> tuple[float, int]:
        """The least price of `num` groups, and how many of them are the last type's."""
        sizes = range(1, min(num, cover.max_groups) + 1)
        return min(((fewer[num - m] + cover.price(m), m) for m in sizes), default=(inf, 0))

    def price(self, num_groups: int) -> float:
        """The least price of at most so many groups; infinite if they cannot cover."""
        return self._prices[-1][num_groups]

    def groups(self, num_groups: int) -> list[list[Choice]]:
        """Groups of that price, by type."""
        groups, left = [], num_groups
        for cover, fewer in zip(self._covers[::-1], self._prices[-2::-1], strict=True):
            _, num = self._best_split(cover, fewer, left)
            groups.append(cover.groups(num))
            left -= num
        return groups[::-1]
