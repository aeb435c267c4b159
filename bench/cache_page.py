"""The live cache page in headless Chromium: what an update costs, and screenshots.

    .venv/bin/python bench/cache_page.py [docs]

Needs Debian's chromium and chromium-driver, and selenium. The time is what the page's main thread
spends on one update that changes all of 10,000 blocks, from its JSON to its pixels; ten a second
come. The screenshots are docs/cache.png and docs/cache-dark.png.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

NUM_BLOCKS = 10_000

# A pool of arguments[0] blocks in two groups, then updates of all; their milliseconds.
FILL = """
const count = arguments[0], groups = [{kind: "full", block_size: 16, num_layers: 2},
                                      {kind: "sliding window", block_size: 16, num_layers: 4}];
take({type: "pool", num_blocks: count + 1, groups});
const times = [];
for (let step = 0; step < arguments[1]; step++) {
  const blocks = Array.from({length: count}, (_, i) =>
    [i + 1, i % 2, "00ff", (i + step) % 3 ? [String((i + step) % 64)] : [], i % 100]);
  const requests = Array.from({length: 64}, (_, id) => ({id, status: "running", max_tokens: 99,
    num_prompt_tokens: 9, num_cached_tokens: 0, num_computed_tokens: 9 + step,
    num_tokens: 9 + step}));
  const message = JSON.stringify({type: "update", num_steps: step, requests, blocks, freed: [],
    num_running: 64, num_waiting: 0, num_preemptions: 0, num_used_blocks: 1,
    num_queried_tokens: 0, num_hit_tokens: 0});
  const start = performance.now();
  take(JSON.parse(message));
  brush.getImageData(0, 0, 1, 1);
  times.push(performance.now() - start);
}
return times;
"""

NUM_USED = "return [...kvloom.blocks.values()].filter(b => b.owners.length).length"


def open_browser() -> Any:
    """Headless Chromium, or None where it is not installed."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,860"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def main() -> None:
    """Serve the default model, put load on it, look at the page."""
    browser = open_browser()
    if browser is None:
        sys.exit("chromium and chromium-driver are not installed (apt-get install)")
    command = [sys.executable, "-m", "kvloom", "serve", "--port", "0", "--num-blocks", "400"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        if len(sys.argv) > 1:
            take_screenshots(browser, url, Path(sys.argv[1]))
        browser.get(f"{url}/cache")
        time.sleep(1.0)
        times = browser.execute_script(FILL, NUM_BLOCKS, 20)
        median = statistics.median(times)
        print(f"{NUM_BLOCKS} blocks, all changed: {median:.1f} ms, at most {max(times):.1f} ms")
        browser.quit()
        server.terminate()


def take_screenshots(browser: Any, url: str, folder: Path) -> None:
    """Conversations that share a system prompt, the first of them ended, in light and in dark."""
    browser.get(f"{url}/cache")
    system = "You are a patient teacher of physics who explains with everyday examples. " * 8
    things = ("heat", "sound", "light", "a magnet", "a rainbow", "gravity", "ice", "a battery")
    for num_tokens in (90, 900):
        threads = [
            threading.Thread(target=ask, args=(url, system, f"What is {t}?", num_tokens))
            for t in things
        ]
        for thread in threads:
            thread.start()
        if num_tokens < 100:
            for thread in threads:
                thread.join()
    folder.mkdir(parents=True, exist_ok=True)
    while browser.execute_script(NUM_USED) < 150:
        time.sleep(0.1)
    for scheme, name in (("light", "cache.png"), ("dark", "cache-dark.png")):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        time.sleep(0.5)
        browser.save_screenshot(str(folder / name))
    for thread in threads:
        thread.join()


def ask(url: str, system: str, question: str, num_tokens: int) -> None:
    """Post one chat, and wait for its answer."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    main()
