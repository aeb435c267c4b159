"""From samples to the report: medians of per-round ratios, against the bars and the limits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers_cells import (
    CELLS,
    ENOUGH_OF_LIMIT,
    Bar,
    Cell,
    Format,
    ModelSize,
    OpsPerSecond,
    limit_seconds,
)

NONE = "-"
QUIET_SHARE = 0.04  # of the processors: what others may use during a run


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed batch.

    Attributes:
        read_bytes_per_s, bf16_flop_per_s, int8_op_per_s: probed just before and after it, the mean.
        foreign_share: of the processors, what processes other than the engine used meanwhile.
    """

    round: int
    cell: str
    engine: str
    seconds: float
    read_bytes_per_s: float
    bf16_flop_per_s: float
    int8_op_per_s: float
    foreign_share: float


@dataclass(frozen=True, slots=True)
class Results:
    """All samples of a run, and what is needed to set them beside the limits.

    Attributes:
        peaks: of the arithmetic; None: what was probed beside each sample.
    """

    samples: Sequence[Sample]
    size: ModelSize
    formats: Mapping[str, Format]
    bars: Sequence[Bar] = ()
    peaks: OpsPerSecond | None = None

    @property
    def engines(self) -> list[str]:
        """In the order of their first sample."""
        return list(dict.fromkeys(sample.engine for sample in self.samples))

    def of(self, cell: Cell, engine: str) -> dict[int, Sample]:
        """An engine's samples of a cell, by round."""
        return {s.round: s for s in self.samples if s.cell == cell.name and s.engine == engine}

    def limit_share(self, cell: Cell, engine: str) -> float | None:
        """The median over rounds of limit / time, each at its own bandwidth and peaks."""
        form = self.formats[engine]
        shares = []
        for s in self.of(cell, engine).values():
            peaks = self.peaks or OpsPerSecond(s.bf16_flop_per_s, s.int8_op_per_s)
            limit = limit_seconds(cell, self.size, form, s.read_bytes_per_s, peaks)
            shares.append(limit / s.seconds)
        return statistics.median(shares) if shares else None


def median_seconds(samples: Mapping[int, Sample]) -> float:
    """Over the rounds."""
    return statistics.median(s.seconds for s in samples.values())


def best_peer(results: Results, cell: Cell, bar: Bar) -> str | None:
    """The configuration of the peer that is faster in this cell; None if none was run."""
    times = {
        peer: median_seconds(samples) for peer in bar.peers if (samples := results.of(cell, peer))
    }
    return min(times, key=lambda peer: times[peer]) if times else None


def ratio(results: Results, cell: Cell, bar: Bar) -> float | None:
    """How many times faster we are: the median over rounds of the two times in one round."""
    peer = best_peer(results, cell, bar)
    if peer is None:
        return None
    ours, theirs = results.of(cell, bar.ours), results.of(cell, peer)
    ratios = [theirs[r].seconds / ours[r].seconds for r in ours.keys() & theirs.keys()]
    return statistics.median(ratios) if ratios else None


def verdict(results: Results, cell: Cell, bar: Bar) -> str:
    """One field of the table of bars."""
    measured = ratio(results, cell, bar)
    if measured is None:
        return NONE
    needed = bar.ratios[CELLS.index(cell)]
    text = f"{measured:.2f} x of {needed:g} x"
    if measured >= needed:
        return f"{text}: pass"
    share = results.limit_share(cell, bar.ours) or 0.0
    if bar.ours == "kvloom-bf16" and cell.num_requests == 1 and share >= ENOUGH_OF_LIMIT:
        return f"{text}: pass at {share:.0%} of the limit"
    return f"{text}: SHORT"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def bars_table(results: Results) -> list[str]:
    """Ratios beside what they must be."""
    rows = [[bar.title, *(verdict(results, cell, bar) for cell in CELLS)] for bar in results.bars]
    return table(["kvloom against", *(cell.name for cell in CELLS)], rows)


def rates_table(results: Results) -> list[str]:
    """Every engine's tokens per second, seconds, and share of the limit."""

    def field(cell: Cell, engine: str) -> str:
        samples = results.of(cell, engine)
        if not samples:
            return NONE
        seconds = median_seconds(samples)
        share = results.limit_share(cell, engine)
        return f"{cell.num_counted_tokens / seconds:,.0f} tok/s ({seconds:.2f} s) {share:.0%}"

    rows = [[engine, *(field(cell, engine) for cell in CELLS)] for engine in results.engines]
    return table(["engine", *(cell.name for cell in CELLS)], rows)


def noise_lines(results: Results) -> list[str]:
    """How steady the machine was."""
    read = sorted(s.read_bytes_per_s / 1e9 for s in results.samples)
    num_rounds = len({s.round for s in results.samples})
    busy = [s for s in results.samples if s.foreign_share > QUIET_SHARE]
    return [
        f"{num_rounds} rounds; bandwidth beside the runs {read[0]:.1f} to {read[-1]:.1f} GB/s, "
        f"median {statistics.median(read):.1f}",
        _peak_line("bf16 GFLOP/s", [s.bf16_flop_per_s for s in results.samples]),
        _peak_line("int8 GOP/s", [s.int8_op_per_s for s in results.samples]),
        f"{len(busy)} of {len(results.samples)} runs had other processes on more than "
        f"{QUIET_SHARE:.0%} of the processors",
    ]


def _peak_line(unit: str, rates: Sequence[float]) -> str:
    found = sorted(rate / 1e9 for rate in rates)
    return f"{unit} beside the runs {found[0]:.0f} to {found[-1]:.0f}, median " + (
        f"{statistics.median(found):.0f}"
    )


def report(results: Results) -> list[str]:
    """All of it, as lines of Markdown."""
    return [
        *bars_table(results),
        "",
        "Tokens per second (of the output, or of the prompt where there is nothing else), seconds,",
        "share of the limit: bytes at the bandwidth probed beside each run, arithmetic at the peak",
        "",
        *rates_table(results),
        "",
        *noise_lines(results),
    ]
