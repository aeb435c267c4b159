"""Ratios, the better of two configurations, limits by hand, and what passes."""

from __future__ import annotations

import pytest
from peers_cells import (
    CELLS,
    MODELS,
    AttentionSize,
    Cell,
    Format,
    ModelSize,
    OpsPerSecond,
    limit_seconds,
)
from peers_report import Results, Sample, bars_table, best_peer, ratio, report, verdict

SINGLE = CELLS[0]
AGAINST_PACE, AGAINST_OPENVINO, *_ = MODELS["smollm2"].bars
SIZE = ModelSize(1000, 100, (AttentionSize(num_kv_values=10, num_products=20),))
FAST = OpsPerSecond(1e12, 1e12)
FORMATS = {
    name: Format(2000.0, 200.0, 2.0, is_int8=False)
    for name in ("kvloom-bf16", "kvloom-q4", "pace", "openvino", "openvino-bf16", "vllm", "llama")
}


def results(*times, cell=SINGLE, read_bytes_per_s=1e9):
    """`times`: engine, then its seconds in rounds 0, 1, ..."""
    samples = [
        Sample(number, cell.name, engine, seconds, read_bytes_per_s, 1e12, 1e12, 0.0)
        for engine, *rounds in times
        for number, seconds in enumerate(rounds)
        if seconds is not None
    ]
    return Results(samples, SIZE, FORMATS, MODELS["smollm2"].bars)


def test_there_is_a_bar_for_every_cell():
    assert len(CELLS) == 5
    assert all(len(bar.ratios) == len(CELLS) for bar in MODELS["smollm2"].bars)


def test_ratio_is_the_median_of_each_rounds_own():
    # The medians of the times themselves, 2 and 8, would give 4.
    slow = results(("kvloom-bf16", 1.0, 30.0, 2.0), ("pace", 2.0, 9.0, 8.0))
    assert ratio(slow, SINGLE, AGAINST_PACE) == pytest.approx(2.0)  # of 2, 0.3 and 4


def test_rounds_that_one_of_both_lacks_do_not_count():
    some = results(("kvloom-bf16", 1.0, 1.0), ("pace", 3.0, None))
    assert ratio(some, SINGLE, AGAINST_PACE) == pytest.approx(3.0)


def test_a_peer_without_samples_has_no_ratio():
    assert ratio(results(("kvloom-bf16", 1.0)), SINGLE, AGAINST_PACE) is None
    assert verdict(results(("kvloom-bf16", 1.0)), SINGLE, AGAINST_PACE) == "-"


def test_the_better_configuration_of_a_peer_counts_in_each_cell():
    both = results(("kvloom-q4", 1.0, 1.0), ("openvino", 3.0, 5.0), ("openvino-bf16", 3.5, 3.5))
    assert best_peer(both, SINGLE, AGAINST_OPENVINO) == "openvino-bf16"
    assert ratio(both, SINGLE, AGAINST_OPENVINO) == pytest.approx(3.5)


@pytest.mark.parametrize(("seconds", "is_pass"), [(1.89, False), (1.9, True), (4.0, True)])
def test_a_bar_is_reached_or_not(seconds, is_pass):
    text = verdict(results(("kvloom-bf16", 1.0), ("pace", seconds)), SINGLE, AGAINST_PACE)
    assert ("pass" in text) == is_pass
    assert ("SHORT" in text) == (not is_pass)


@pytest.mark.parametrize(("share", "is_pass"), [(0.89, False), (0.91, True)])
def test_a_single_bf16_request_also_passes_near_its_limit(share, is_pass):
    limit = limit_seconds(SINGLE, SIZE, FORMATS["kvloom-bf16"], 1e9, FAST)
    text = verdict(
        results(("kvloom-bf16", limit / share), ("pace", limit / share)), SINGLE, AGAINST_PACE
    )
    assert ("pass" in text) == is_pass


def test_batches_and_quantised_cells_do_not_pass_by_their_limit():
    batch = CELLS[1]
    limit = limit_seconds(batch, SIZE, FORMATS["kvloom-bf16"], 1e9, FAST)
    near = results(("kvloom-bf16", limit), ("pace", limit), cell=batch)
    assert "SHORT" in verdict(near, batch, AGAINST_PACE)
    limit = limit_seconds(SINGLE, SIZE, FORMATS["kvloom-q4"], 1e9, FAST)
    near = results(("kvloom-q4", limit), ("openvino", limit))
    assert "SHORT" in verdict(near, SINGLE, AGAINST_OPENVINO)


def test_share_of_the_limit_uses_what_was_probed_beside_each_run():
    """Each takes twice its limit; the arithmetic's peak matters to the last one, unless stated."""
    form, samples = FORMATS["kvloom-bf16"], []
    for number, (rate, peak) in enumerate(((1e9, 1e12), (2e9, 1e12), (1e15, 1e3))):
        limit = limit_seconds(SINGLE, SIZE, form, rate, OpsPerSecond(peak, 1e12))
        samples.append(Sample(number, SINGLE.name, "kvloom-bf16", 2 * limit, rate, peak, 1e12, 0.0))
    for some in (samples, samples[:1], samples[2:]):
        shares = Results(some, SIZE, FORMATS).limit_share(SINGLE, "kvloom-bf16")
        assert shares == pytest.approx(0.5)
    stated = Results(samples[2:], SIZE, FORMATS, peaks=OpsPerSecond(2e3, 1e12))
    assert stated.limit_share(SINGLE, "kvloom-bf16") == pytest.approx(0.25)


def test_limit_of_reading_alone():
    """Arithmetic is free: bytes over bandwidth, step by step.

    The prompt's step reads 2000 + 200 of weights and the KV it has just made, 3 tokens of 20 bytes;
    the one step after it reads the weights again and 4 tokens.
    """
    cell, free = Cell("", 1, 3, 2), OpsPerSecond(1e30, 1e30)
    form = Format(2000.0, 200.0, 2.0, is_int8=False)
    assert limit_seconds(cell, SIZE, form, 1.0, free) == pytest.approx(2200 + 60 + 2200 + 80)
    # Two requests read the weights once, and each its own KV.
    cell = Cell("", 2, 3, 2)
    assert limit_seconds(cell, SIZE, form, 1.0, free) == pytest.approx(2200 + 120 + 2200 + 160)


@pytest.mark.parametrize(("is_int8", "head_too"), [(False, 1), (True, 2), (False, 2)])
def test_limit_of_arithmetic_alone(is_int8, head_too):
    """Memory is free: 2 operations per weight and token, the head for the last token only.

    Attention: 3 tokens see 1 + 2 + 3 keys, and the next one 4; 20 products each, always in bf16.
    """
    cell = Cell("", 1, 3, 2)
    form = Format(2000.0, 200.0, 2.0, is_int8, is_head_int8=head_too == 2)
    body, head = 2 * 1000 * 3 + 2 * 1000, 2 * 100 + 2 * 100
    attention = 2 * 20 * (6 + 4)
    limit = limit_seconds(cell, SIZE, form, 1e30, OpsPerSecond(1.0, 2.0))
    assert limit == pytest.approx(body / (2 if is_int8 else 1) + head / head_too + attention)


def test_limit_of_layers_with_a_window():
    """A window of 2: queries see 1 + 2 + 2 keys, then 2; the whole prompt has its KV read once."""
    cell, form = Cell("", 1, 3, 2), Format(0.0, 0.0, 2.0, is_int8=False)
    size = ModelSize(0, 0, (AttentionSize(10, 20), AttentionSize(1, 3, window=2)))
    reading = limit_seconds(cell, size, form, 1.0, OpsPerSecond(1e30, 1e30))
    assert reading == pytest.approx((60 + 80) + (6 + 4))
    computing = limit_seconds(cell, size, form, 1e30, OpsPerSecond(1.0, 1.0))
    assert computing == pytest.approx(2 * 20 * (6 + 4) + 2 * 3 * (5 + 2))


def test_parts_have_limits_of_their_own():
    """The body waits for memory, the head for arithmetic, attention for memory."""
    cell = Cell("", 1, 1, 1)
    form = Format(5000.0, 1.0, 100.0, is_int8=False)
    limit = limit_seconds(cell, SIZE, form, 1.0, OpsPerSecond(1.0, 1.0))
    assert limit == pytest.approx(5000 + 200 + 1000)


def test_report_has_every_engine_and_bar():
    lines = "\n".join(report(results(("kvloom-bf16", 1.0), ("pace", 2.0))))
    assert "128 tok/s (1.00 s)" in lines  # 128 output tokens
    assert "2.00 x of 1.9 x: pass" in lines
    assert all(bar.title in lines for bar in MODELS["smollm2"].bars)
    assert "1.0 to 1.0 GB/s" in lines


def test_a_prompt_cell_counts_prompt_tokens():
    prefill = CELLS[3]
    assert prefill.num_counted_tokens == 2048
    assert CELLS[2].num_counted_tokens == 32 * 128
    assert "| - |" in "\n".join(bars_table(results(("kvloom-bf16", 1.0), cell=prefill)))
