"""The page of a simulation: well-formed, on its own, and with what it should show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from kvloom.simulate.html import Page, plots_of
from kvloom.simulate.results import Limits, summarise
from kvloom.simulate.routing import round_robin
from kvloom.simulate.run import Simulation
from kvloom.simulate.svg import Axis, Plot
from simulated_engines import UnitCost, make_engine, requests_of


@pytest.fixture(scope="module")
def result():
    simulation = Simulation(make_engine(), UnitCost(), 2, round_robin)
    return simulation.run(requests_of(*[(float(i), 5 + i, 4) for i in range(6)]))


def test_the_page_is_well_formed_and_loads_nothing(result):
    limits = Limits()
    runs = [("tp <4>", result, summarise(result, limits)), ("", result, summarise(result, limits))]
    page = Page("a & b", [("device", "<h100>")], [("tp",), ("4",)]).render(runs, limits)
    root = ElementTree.fromstring(
        page.removeprefix("<!doctype html>").replace('<meta charset="utf-8">', "")
    )
    assert [h.text for h in root.iter("h1")] == ["a & b"]
    assert [h.text for h in root.iter("h2")] == ["tp <4>"]
    assert len(list(root.iter("svg"))) == 2 * len(plots_of(result))
    assert "<h100>" in [cell.text for cell in root.iter("td")]
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)


def test_distributions_end_with_all_requests(result):
    first = next(p for p in plots_of(result) if p.title == "Time to first token")
    (line,) = first.lines.values()
    assert [share for _, share in line] == pytest.approx([100 * i / 6 for i in range(1, 7)])
    assert [value for value, _ in line] == sorted(value for value, _ in line)


@pytest.mark.parametrize(
    ("largest", "step", "end"),
    [(0.0, 1.0, 1.0), (1.0, 0.2, 1.0), (7.3, 2.0, 8.0), (100.0, 20.0, 100.0), (0.031, 0.01, 0.04)],
)
def test_axes_end_at_round_numbers(largest, step, end):
    axis = Axis.over("x", largest)
    assert (axis.step, axis.end) == pytest.approx((step, end))
    assert len(list(axis.ticks())) <= 6


def test_lines_reach_from_corner_to_corner():
    """The plot's frame: 64 to 548 across, 200 down to 30."""
    svg = ElementTree.fromstring(Plot("t", "x", "y", {"a": [(0.0, 0.0), (10.0, 5.0)]}).render())
    (line,) = svg.iter("polyline")
    assert line.get("points") == "64.0,200.0 548.0,30.0"


def test_many_points_are_thinned():
    line = [(float(i), 1.0) for i in range(10_000)]
    svg = ElementTree.fromstring(Plot("t", "x", "y", {"a": line}).render())
    assert len(next(svg.iter("polyline")).get("points").split()) <= 400
