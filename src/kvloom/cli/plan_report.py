"""A plan as text for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvloom.config import AUTO
from kvloom.dtypes import DType
from kvloom.kv.memory import format_bytes
from kvloom.kv.spec import KVLimits
from kvloom.shapes import ShapeBuckets

if TYPE_CHECKING:
    from kvloom.cli.plan import Planned
    from kvloom.kv.planner import KVCachePlan

Row = tuple[str, str, str]  # what it is, the number, where it comes from


def as_json(planned: Planned) -> str:
    """The plan as one object; workers are KVCacheConfig objects, field by field."""
    plan = planned.plan
    block_size = next(iter(planned.specs.values())).block_size
    summary = {
        "max_model_len": plan.max_model_len,
        "block_size": block_size,
        "num_blocks": plan.num_blocks,
        "max_concurrency": plan.max_concurrency,
        "padding_percent": plan.padding_percent,
        "weights_bytes": planned.weights_bytes,
        "buckets": None if planned.buckets is None else asdict(planned.buckets),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "workers": [asdict(config) for config in plan.configs],
    }
    return json.dumps(summary, indent=2, default=_dtype_name) + "\n"


def _dtype_name(value: Any) -> str:
    if isinstance(value, DType):
        return value.value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def as_text(planned: Planned) -> str:
    """The plan of one rank in four sections, each number with its arithmetic."""
    budgets = planned.request.budgets
    sections = {
        "Memory (peak activation is measured at start: a plan counts none)": [
            (line.label, format_bytes(line.num_bytes), "")
            for line in min(budgets, key=lambda b: b.kv_bytes).lines
        ],
        "Layers": _layer_rows(planned),
        "Pool": _pool_rows(planned.plan),
        "Requests": _request_rows(planned),
    }
    if planned.buckets is not None:
        sections["Step shapes (the device compiles one program for each)"] = _shape_rows(
            planned.buckets
        )
    rows = [row for section in sections.values() for row in section]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    tables = (f"\n{title}\n{_table(section, widths)}" for title, section in sections.items())
    return (
        f"{planned.title}: weights {planned.dtypes.weights.value}, KV {planned.dtypes.kv.value}, "
        f"one of {len(budgets)} rank(s)\n{''.join(tables)}"
    )


def _table(rows: list[Row], widths: list[int]) -> str:
    lines = (
        f"  {label:<{widths[0]}}  {number:>{widths[1]}}  {note}".rstrip()
        for label, number, note in rows
    )
    return "".join(f"{line}\n" for line in lines)


def _shape_rows(buckets: ShapeBuckets) -> list[Row]:
    """What steps are padded to."""
    lists = {
        "token counts": buckets.num_tokens,
        "requests": buckets.num_reqs,
        "context lengths": buckets.context_lens,
    }
    return [
        *((name, str(len(sizes)), ", ".join(map(str, sizes))) for name, sizes in lists.items()),
        ("prefill segment", str(buckets.prefill_segment), "tokens of one request in a step"),
    ]


def _layer_rows(planned: Planned) -> list[Row]:
    """One row per kind of layer."""
    return [
        (
            f"{count} x {type(spec).__name__}",
            f"{spec.page_size_bytes:,} B",
            f"one block of one layer: {spec.page_formula}",
        )
        for spec, count in Counter(planned.specs.values()).items()
    ]


def _pool_rows(plan: KVCachePlan) -> list[Row]:
    tightest = _tightest(plan)
    available, block_bytes = plan.available_bytes[tightest], plan.block_bytes[tightest]
    config = plan.configs[tightest]
    left_over = available - plan.num_blocks * block_bytes
    return [
        *_group_rows(plan),
        ("block", f"{block_bytes:,} B", "any group may take it: as large as the largest"),
        ("num_blocks", f"{plan.num_blocks:,}", f"{available:,} B // {block_bytes:,} B"),
        ("usable blocks", f"{plan.num_blocks - 1:,}", "block 0 is reserved: it means no block"),
        *(
            (f"{count} x tensor", f"{size:,} B", f"{size // plan.num_blocks:,} B x num_blocks")
            for size, count in Counter(t.size for t in config.kv_cache_tensors).items()
        ),
        ("left over", f"{left_over:,} B", "less than a block"),
        ("padding", f"{plan.padding_percent:.2f} %", "of a request's blocks: no layer fills it"),
    ]


def _tightest(plan: KVCachePlan) -> int:
    return plan.available_bytes.index(min(plan.available_bytes))


def _group_rows(plan: KVCachePlan) -> list[Row]:
    tightest = _tightest(plan)
    groups = plan.configs[tightest].kv_cache_groups
    return [
        (
            f"group {i}",
            f"{len(group.layer_names)} layers",
            f"in blocks of {group.kv_cache_spec.block_size} tokens: {num_bytes:,} B",
        )
        for i, (group, num_bytes) in enumerate(zip(groups, plan.group_bytes[tightest], strict=True))
    ]


def _request_rows(planned: Planned) -> list[Row]:
    plan, request = planned.plan, planned.request
    limits = KVLimits(plan.max_model_len, request.max_num_batched_tokens)
    if request.max_model_len != AUTO:
        length_note = f"as asked; the model was made for {request.model_max_len}"
    elif plan.max_model_len == request.model_max_len:
        length_note = "what the model was made for"
    else:
        length_note = f"the largest that fits; the model was made for {request.model_max_len}"
    return [
        ("max_model_len", f"{plan.max_model_len}", length_note),
        ("KV per token", f"{plan.kv_bytes_per_token:,} B", "over all layers"),
        _blocks_of_a_request(planned, limits),
        *_reserve_rows(plan, limits),
        _concurrency_row(planned),
    ]


def _blocks_of_a_request(planned: Planned, limits: KVLimits) -> Row:
    plan = planned.plan
    if planned.request.layout == "vllm":
        note = f"for {plan.max_model_len} tokens, and the chunk in flight beside each window"
    else:
        stored = limits.max_stored_tokens
        note = f"for {stored} stored tokens: the last of max_model_len is never stored"
    by_group = _sum_of([cost.num_steady_blocks for cost in plan.group_costs])
    return "blocks of a request", f"{plan.num_blocks_per_request:,}", by_group + note


def _reserve_rows(plan: KVCachePlan, limits: KVLimits) -> list[Row]:
    """What chunks in flight hold beyond these; where nothing has a window, nothing."""
    if not plan.num_reserved_blocks:
        return []
    by_group = _sum_of([cost.num_reserved_blocks for cost in plan.group_costs])
    chunk = f"once for all requests: windows with {limits.max_num_batched_tokens} tokens in flight"
    return [("reserve", f"{plan.num_reserved_blocks:,}", by_group + chunk)]


def _sum_of(by_group: list[int]) -> str:
    """The groups' summands; one alone is the sum."""
    return f"{' + '.join(map(str, by_group))}, " if len(by_group) > 1 else ""


def _concurrency_row(planned: Planned) -> Row:
    plan = planned.plan
    usable, note = f"{plan.num_blocks - 1:,}", ""
    if planned.request.layout == "vllm":
        usable, note = f"{plan.num_blocks:,}", "; vLLM counts block 0, which holds none"
    elif plan.num_reserved_blocks:
        usable = f"({usable} - {plan.num_reserved_blocks:,})"
    return (
        "max_concurrency",
        f"{plan.max_concurrency:.3f}",
        f"{usable} / {plan.num_blocks_per_request:,} requests of that length{note}",
    )
