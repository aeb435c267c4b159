"""The live cache page in headless Chromium: blocks appear, are shared, and go with an abort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cache_page import FILL, open_browser

from live_server import LiveServer, slow_steps

pytest.importorskip("selenium", reason="it drives the page")

COUNT = """
const all = [...kvloom.blocks.values()];
return {updates: kvloom.updates, slowest: kvloom.slowest,
        used: all.filter(b => b.owners.length > 0).length,
        shared: all.filter(b => b.owners.length > 1).length,
        cached: all.filter(b => b.owners.length === 0).length,
        rows: document.querySelectorAll("#requests tr").length,
        block: document.getElementById("block").textContent,
        tabs: [...document.querySelectorAll("[role=tab]")].map(t => t.textContent)};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    browser = open_browser()
    if browser is None:
        pytest.skip("chromium and chromium-driver are not installed")
    yield browser
    browser.quit()


def wait_for(browser: Any, condition: Any) -> dict[str, Any]:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60, 0.05).until(
        lambda b: (state := b.execute_script(COUNT)) and condition(state) and state
    )


def test_blocks_come_are_shared_and_go(browser: Any, live: LiveServer) -> None:
    live.inspect(lambda core: core.manager.reset_prefix_cache())
    browser.get(f"{live.url}/cache")
    empty = wait_for(browser, lambda s: s["updates"] >= 2)
    assert (empty["used"], empty["cached"], empty["rows"]) == (0, 0, 0)
    assert empty["tabs"] == ["all groups", "0: full, 2 layers"]

    prompt = list(range(100, 140))  # two whole blocks, and a part
    body = {"prompt": [prompt, prompt], "max_tokens": 200, "ignore_eos": True, "stream": True}
    is_seen = slow_steps(live)
    try:
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60):
            both = wait_for(browser, lambda s: s["shared"] == 2 and s["rows"] == 2)
    finally:
        is_seen.set()
    assert both["used"] >= 4
    gone = wait_for(browser, lambda s: s["used"] == 0 and s["rows"] == 0)  # aborted by hanging up
    assert gone["cached"] >= 2

    canvas = browser.find_element("id", "pool")
    canvas.send_keys("\ue014", "\ue014")  # arrow right
    assert wait_for(browser, lambda s: s["block"].startswith("block 2: "))
    browser.find_elements("css selector", "[role=tab]")[1].click()
    tabs = browser.find_elements("css selector", "[role=tab]")
    assert tabs[1].get_attribute("aria-selected") == "true"


def test_ten_thousand_blocks_are_all_there(browser: Any, live: LiveServer) -> None:
    """Two updates that change every block of a pool with two groups."""
    browser.get(f"{live.url}/cache")
    wait_for(browser, lambda s: s["updates"] >= 1)
    browser.execute_script(FILL, 10_000, 2)
    state = browser.execute_script(COUNT)
    assert state["used"] + state["cached"] == 10_000
    assert state["shared"] == 0
    assert len(state["tabs"]) == 3
