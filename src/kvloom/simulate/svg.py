"""Line plots as SVG, for a page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 30, 40
_MAX_POINTS = 400
# Told apart by readers who do not see all colours (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000")


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to a round number; `name` says the unit."""

    name: str
    step: float
    num_steps: int

    @classmethod
    def over(cls, name: str, largest: float) -> Axis:
        """An axis that holds `largest`, in steps of 1, 2 or 5 times a power of ten."""
        if largest <= 0:
            return cls(name, 1.0, 1)
        power = 10.0 ** math.floor(math.log10(largest))
        step = next(s * power for s in (0.2, 0.5, 1.0, 2.0) if largest / (s * power) <= 5)
        return cls(name, step, max(math.ceil(largest / step - 1e-9), 1))

    @property
    def end(self) -> float:
        """The largest number on it."""
        return self.step * self.num_steps

    def ticks(self) -> Iterator[float]:
        """The numbers that are written on it."""
        return (i * self.step for i in range(self.num_steps + 1))


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over a common axis. Numbers are not negative."""

    title: str
    x_name: str
    y_name: str
    lines: Mapping[str, Sequence[Point]]

    def render(self) -> str:
        """The SVG element."""
        points = [point for line in self.lines.values() for point in line]
        x_axis = Axis.over(self.x_name, max((x for x, _ in points), default=0.0))
        y_axis = Axis.over(self.y_name, max((y for _, y in points), default=0.0))
        colours = dict(
            zip(self.lines, COLOURS * (len(self.lines) // len(COLOURS) + 1), strict=False)
        )
        body = [
            f'<text class="title" x="{_LEFT}" y="16">{escape(self.title)}</text>',
            *_grid(x_axis, y_axis),
            *(
                _polyline(line, colours[name], x_axis, y_axis)
                for name, line in self.lines.items()
                if line
            ),
            *(_legend(colours) if len(colours) > 1 else ()),
        ]
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(self.title)}">{"".join(body)}</svg>'
        )


def _x_of(x: float, axis: Axis) -> float:
    return _LEFT + x / axis.end * (_WIDTH - _LEFT - _RIGHT)


def _y_of(y: float, axis: Axis) -> float:
    return _HEIGHT - _BOTTOM - y / axis.end * (_HEIGHT - _TOP - _BOTTOM)


def _grid(x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for y in y_axis.ticks():
        at = _y_of(y, y_axis)
        yield f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>'
        yield f'<text class="y" x="{_LEFT - 6}" y="{at + 4:.1f}">{y:g}</text>'
    for x in x_axis.ticks():
        at = _x_of(x, x_axis)
        yield f'<path class="grid" d="M{at:.1f} {bottom}v4"/>'
        yield f'<text class="x" x="{at:.1f}" y="{bottom + 16}">{x:g}</text>'
    centre, middle = (_LEFT + right) / 2, (_TOP + bottom) / 2
    yield f'<text class="x" x="{centre}" y="{_HEIGHT - 6}">{escape(x_axis.name)}</text>'
    turned = f"translate(14 {middle}) rotate(-90)"
    yield f'<text class="x" transform="{turned}">{escape(y_axis.name)}</text>'


def _polyline(line: Sequence[Point], colour: str, x_axis: Axis, y_axis: Axis) -> str:
    kept = line[:: -(-len(line) // _MAX_POINTS)]
    points = " ".join(f"{_x_of(x, x_axis):.1f},{_y_of(y, y_axis):.1f}" for x, y in kept)
    return f'<polyline fill="none" stroke="{colour}" points="{points}"/>'


def _legend(colours: Mapping[str, str]) -> Iterator[str]:
    x = float(_LEFT) + 220
    for name, colour in colours.items():
        yield f'<rect x="{x:.0f}" y="8" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14:.0f}" y="17">{escape(name)}</text>'
        x += 24 + 7 * len(name)
