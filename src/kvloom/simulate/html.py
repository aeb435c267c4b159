"""A simulation as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from kvloom.simulate.report import Row, rows_of
from kvloom.simulate.results import (
    Limits,
    Summary,
    time_per_token,
    time_to_first_token,
)
from kvloom.simulate.run import SimulationResult
from kvloom.simulate.svg import Plot, Point

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.2rem .9rem .2rem 0;text-align:right;font-variant-numeric:tabular-nums}
td:first-child,th:first-child,td:last-child.note{text-align:left}
tr{border-bottom:1px solid #8884}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1rem}
svg text{font:11px system-ui,sans-serif;fill:currentColor}
svg .title{font-weight:600;font-size:13px}
svg .x{text-anchor:middle}svg .y{text-anchor:end}
svg .grid{stroke:#8886;fill:none}svg polyline{stroke-width:1.6}
"""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows.

    Attributes:
        title: model, device and number of replicas.
        facts: what was simulated, as (name, value).
        sweep: rows of a sweep, the first one its header; empty without one.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    sweep: Sequence[Row] = ()

    def render(self, runs: Iterable[tuple[str, SimulationResult, Summary]], limits: Limits) -> str:
        """The page; each run has a heading, numbers and plots."""
        body = [
            f"<h1>{escape(self.title)}</h1>",
            _table([(*fact,) for fact in self.facts], has_header=False),
            _table(self.sweep, has_header=True) if self.sweep else "",
        ]
        for heading, result, summary in runs:
            body += [
                f"<h2>{escape(heading)}</h2>" if heading else "",
                _table(rows_of(summary, limits), has_header=False),
                f'<div class="plots">{"".join(plot.render() for plot in plots_of(result))}</div>',
            ]
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body>{''.join(body)}</body></html>\n"
        )


def plots_of(result: SimulationResult) -> list[Plot]:
    """How full the replicas were over time, and how latencies are distributed."""
    samples = result.samples
    num_groups = len(samples[0].used_shares) if samples else 0
    waited = [r.started - r.arrival for r in result.records if r.started is not None]
    return [
        Plot(
            "Requests",
            "seconds",
            "requests, all replicas",
            {
                "running": [(s.seconds, s.num_running) for s in samples],
                "waiting": [(s.seconds, s.num_waiting) for s in samples],
            },
        ),
        Plot(
            "Blocks in use",
            "seconds",
            "% of usable, mean of replicas",
            {
                f"group {group}": [(s.seconds, 100 * s.used_shares[group]) for s in samples]
                for group in range(num_groups)
            },
        ),
        _distribution("Queueing", waited),
        _distribution("Time to first token", map(time_to_first_token, result.records)),
        _distribution("Time per output token", map(time_per_token, result.records)),
    ]


def _distribution(title: str, values: Iterable[float | None]) -> Plot:
    """How many percent of the requests had at most so many seconds."""
    ordered = sorted(value for value in values if value is not None)
    line: list[Point] = [
        (value, 100 * (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)
    ]
    return Plot(title, "seconds", "% of requests", {title: line})


def _table(rows: Sequence[Row], has_header: bool) -> str:
    lines = []
    for index, row in enumerate(rows):
        tag = "th" if has_header and index == 0 else "td"
        note = ' class="note"' if not has_header else ""
        cells = [f"<{tag}{note}>{escape(cell)}</{tag}>" for cell in row]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"
