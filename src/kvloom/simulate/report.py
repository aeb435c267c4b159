"""A simulation as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.simulate.results import Distribution, Limits, Summary

Row = tuple[str, ...]


def as_text(summary: Summary, limits: Limits) -> str:
    """Latencies as a table of percentiles, all else as rows."""
    header = ("seconds", "mean", "p50", "p90", "p99", "max")
    latencies = {
        "queueing": summary.queueing,
        "time to first token": summary.first_token,
        "time per output token": summary.per_token,
        "whole request": summary.whole,
    }
    table = [header, *(_latency_row(name, d) for name, d in latencies.items())]
    return f"{align(rows_of(summary, limits))}\n{align(table)}"


def rows_of(summary: Summary, limits: Limits) -> list[Row]:
    """What it is, the number, and what it rests on."""
    failed = f", {summary.num_failed:,} of them failed" if summary.num_failed else ""
    return [
        ("requests", f"{summary.num_requests:,}", f"in {summary.seconds:,.1f} s{failed}"),
        ("output", f"{summary.output_tokens_per_second:,.1f} tokens/s", ""),
        ("prompts", f"{summary.prompt_tokens_per_second:,.1f} tokens/s", "prefix hits included"),
        ("requests per second", f"{summary.requests_per_second:,.3f}", ""),
        ("goodput", f"{summary.goodput:,.3f} /s", _limits_note(summary, limits)),
        (
            "prefix hits",
            f"{summary.hit_share:.1%}",
            f"{summary.num_hit_tokens:,} of {summary.num_queried_tokens:,} prompt tokens",
        ),
        (
            "preemptions",
            f"{summary.num_preemptions:,}",
            f"{summary.num_lost_tokens:,} computed tokens lost",
        ),
        ("blocks in use", f"{summary.peak_used_share:.1%}", _blocks_note(summary)),
        ("busy", f"{summary.busy_share:.1%}", f"{summary.num_steps:,} steps"),
    ]


def align(rows: Sequence[Row]) -> str:
    """Columns: the first and the last of three to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    is_note = [len(widths) == 3 and i == 2 for i in range(len(widths))]
    lines = (
        "  ".join(
            f"{cell:<{width}}" if i == 0 or is_note[i] else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "".join(f"  {line}\n" for line in lines)


def format_seconds(seconds: float) -> str:
    """Three decimals, or four where these say little."""
    return f"{seconds:,.3f}" if seconds >= 1 else f"{seconds:.4f}"


def _latency_row(name: str, values: Distribution | None) -> Row:
    if values is None:
        return (name, *["-"] * 5)
    numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
    return (name, *map(format_seconds, numbers))


def _blocks_note(summary: Summary) -> str:
    by_group = " + ".join(f"{share:.1%}" for share in summary.mean_used_shares)
    groups = " by group" if len(summary.mean_used_shares) > 1 else ""
    return f"at the peak of one replica; {by_group or '-'} on average{groups}"


def _limits_note(summary: Summary, limits: Limits) -> str:
    asked = {"first token": limits.first_token, "each further one": limits.per_token}
    kept = [f"{name} within {limit:g} s" for name, limit in asked.items() if limit is not None]
    return f"{summary.good_share:.1%}: {', '.join(kept)}" if kept else "no limits were given"
