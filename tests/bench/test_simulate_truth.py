"""The bench of the simulation's truth: which rounds count, and what is asked of the engine."""

from __future__ import annotations

import pytest
from simulate_truth import Figures, RealEngine, Round

from kvloom.config import EngineConfig
from kvloom.engine.loading import load_engine
from simulated_engines import requests_of
from tiny_folder import make_tiny_folder

REAL = Figures(100.0, 0.020, 0.004)
SIMULATED = Figures(90.0, 0.021, 0.005), Figures(110.0, 0.029, 0.005)


def test_ratios_are_of_means_to_what_was_measured():
    ratios = Round(REAL, SIMULATED, (30e9, 30e9), 0.0).ratios
    assert ratios == pytest.approx((1.0, 1.25, 1.25))


@pytest.mark.parametrize(
    ("bandwidth", "foreign_share", "is_steady"),
    [
        ((30e9, 32.9e9), 0.039, True),
        ((30e9, 33.1e9), 0.0, False),
        ((30e9, 26.9e9), 0.0, False),
        ((30e9, 30e9), 0.041, False),
    ],
)
def test_rounds_count_if_the_machine_was_steady_and_ours(bandwidth, foreign_share, is_steady):
    found = Round(REAL, SIMULATED, bandwidth, foreign_share)
    assert found.is_steady == is_steady
    assert ("discarded" in str(found)) != is_steady


def test_the_engine_serves_each_request_after_its_arrival(tmp_path):
    """All tokens that the trace names come, in the order that time allows."""
    folder = make_tiny_folder(tmp_path)
    config = EngineConfig.from_options({"model": str(folder), "backend": "reference"})
    core = load_engine(config).core
    requests = requests_of((0.0, 5, 3), (0.01, 40, 1), (0.05, 6, 4))
    try:
        records = RealEngine(core).serve(requests)
    finally:
        core.shutdown()
    assert [record.index for record in records] == [0, 1, 2]
    for record, request in zip(records, requests, strict=True):
        assert record.num_prompt_tokens == request.num_prompt_tokens
        assert record.num_output_tokens == request.num_output_tokens
        assert request.arrival == record.arrival < record.first_token <= record.finished
        assert (record.first_token == record.finished) == (request.num_output_tokens == 1)
