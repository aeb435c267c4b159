"""Where every byte of a rank's memory goes, drawn in the terminal and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from kvloom.kv.memory import MemoryBudget, format_bytes
from kvloom.simulate.report import align
from kvloom.simulate.svg import COLOURS

if TYPE_CHECKING:
    from kvloom.cli.plan import Planned
    from kvloom.kv.planner import KVCachePlan

_BAR_WIDTH = 64
_SVG_WIDTH, _SVG_BAR_HEIGHT, _SVG_LINE = 720, 48, 22


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the memory; `mark` stands for it in the terminal's bar."""

    mark: str
    label: str
    num_bytes: int


def segments_of(planned: Planned) -> list[Segment]:
    """All of the tightest rank's memory, in parts; their sum is the whole.

    Blocks belong to no group until they are taken: they are shown as requests of max_model_len
    take them.
    """
    budgets = planned.request.budgets
    rank = min(range(len(budgets)), key=lambda i: budgets[i].kv_bytes)
    budget, plan = budgets[rank], planned.plan
    pool = plan.num_blocks * plan.block_bytes[rank]
    parts = [
        Segment("W", "weights", budget.use.weights_bytes),
        Segment("A", "peak activation, measured at start", budget.use.activation_bytes),
        *_pool_segments(plan, plan.block_bytes[rank]),
        Segment("-", "less than a block", budget.kv_bytes - pool),
    ]
    headroom = _whole_bytes(budget, len(budgets)) - sum(part.num_bytes for part in parts)
    parts.append(Segment(".", "headroom", headroom))
    return [part for part in parts if part.num_bytes]


def _pool_segments(plan: KVCachePlan, block_bytes: int) -> list[Segment]:
    costs = plan.group_costs
    num_free = plan.num_blocks - 1 - plan.num_reserved_blocks
    segments, num_told = [], 0
    num_seen = 0
    for index, cost in enumerate(costs):
        num_seen += cost.num_steady_blocks  # cumulative shares, so that rounding loses none
        num_until = num_free * num_seen // plan.num_blocks_per_request
        num_blocks, num_told = num_until - num_told, num_until
        label = f"{num_blocks:,} blocks of group {index}"
        segments.append(Segment(f"{index}", label, num_blocks * block_bytes))
    reserve = f"{plan.num_reserved_blocks:,} blocks for chunks in flight"
    segments.append(Segment("R", reserve, plan.num_reserved_blocks * block_bytes))
    segments.append(Segment("N", "block 0", block_bytes))
    return segments


def _whole_bytes(budget: MemoryBudget, num_ranks: int) -> int:
    """What the rank has: its budget begins with that, unless the user named the bytes for KV."""
    first = budget.lines[0]
    if first.label == "available at start":
        return first.num_bytes // num_ranks
    if first.label.startswith("weights"):
        return budget.kv_bytes + budget.use.weights_bytes + budget.use.activation_bytes
    return first.num_bytes


def draw_text(segments: Sequence[Segment]) -> str:
    """A bar of letters, and what each of them stands for."""
    whole = sum(segment.num_bytes for segment in segments)
    bar, told, drawn = "", 0, 0
    for segment in segments:
        told += segment.num_bytes
        until = round(_BAR_WIDTH * told / whole)
        bar += segment.mark * (until - drawn)
        drawn = until
    rows = [
        (f"{s.mark} {s.label}", format_bytes(s.num_bytes), f"{s.num_bytes / whole:.1%}")
        for s in segments
    ]
    return f"\nMemory of one rank: {format_bytes(whole)}\n  [{bar}]\n{align(rows)}"


def draw_svg(title: str, segments: Sequence[Segment]) -> str:
    """A file of its own: a bar, and what each colour stands for."""
    whole = sum(segment.num_bytes for segment in segments)
    height = 70 + _SVG_BAR_HEIGHT + _SVG_LINE * len(segments)
    parts, x = [], 0.0
    for index, segment in enumerate(segments):
        colour = COLOURS[index % len(COLOURS)]
        width = _SVG_WIDTH * segment.num_bytes / whole
        y = 66 + _SVG_BAR_HEIGHT + _SVG_LINE * index
        text = (
            f"{segment.label}: {format_bytes(segment.num_bytes)}, {segment.num_bytes / whole:.1%}"
        )
        parts.append(
            f'<rect x="{x:.2f}" y="40" width="{width:.2f}" height="{_SVG_BAR_HEIGHT}" '
            f'fill="{colour}"><title>{escape(text)}</title></rect>'
            f'<rect x="0" y="{y - 11}" width="12" height="12" fill="{colour}"/>'
            f'<text x="20" y="{y}">{escape(text)}</text>'
        )
        x += width
    heading = f"{title}: {format_bytes(whole)} of one rank"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {_SVG_WIDTH + 20} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
        f'<rect x="-10" width="{_SVG_WIDTH + 20}" height="{height}" fill="#fff"/>'
        f'<text x="0" y="24" font-size="16">{escape(heading)}</text>{"".join(parts)}</svg>\n'
    )
