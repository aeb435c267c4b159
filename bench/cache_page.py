"""The live cache page in headless Chromium: what an update costs, and a screenshot.

    .venv/bin/python bench/cache_page.py [docs/cache.png]

Needs Debian's chromium and chromium-driver, and selenium. The time is what the page's main thread
spends on one update that changes all of 10,000 blocks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

NUM_BLOCKS = 10_000

# A pool of arguments[0] blocks in two groups, then whole redraws; their milliseconds.
FILL = """
const count = arguments[0], groups = [{kind: "full", block_size: 16, num_layers: 2},
                                      {kind: "sliding window", block_size: 16, num_layers: 4}];
take({type: "pool", num_blocks: count + 1, groups});
const times = [];
for (let step = 0; step < arguments[1]; step++) {
  const blocks = Array.from({length: count}, (_, i) =>
    [i + 1, i % 2, "00ff", (i + step) % 3 ? [String((i + step) % 64)] : [], i % 100]);
  const start = performance.now();
  take({type: "update", num_steps: step, requests: [], blocks, freed: [], num_running: 0,
        num_waiting: 0, num_preemptions: 0, num_used_blocks: 1, num_queried_tokens: 0,
        num_hit_tokens: 0});
  brush.getImageData(0, 0, 1, 1);
  times.push(performance.now() - start);
}
return times;
"""


def open_browser() -> Any:
    """Headless Chromium, or None where it is not installed."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def main() -> None:
    """Serve the default model, put load on it, look at the page."""
    browser = open_browser()
    if browser is None:
        sys.exit("chromium and chromium-driver are not installed (apt-get install)")
    command = [sys.executable, "-m", "kvloom", "serve", "--port", "0", "--num-blocks", "600"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        if len(sys.argv) > 1:
            take_screenshot(browser, url, Path(sys.argv[1]))
        browser.get(f"{url}/cache")
        time.sleep(1.0)
        times = browser.execute_script(FILL, NUM_BLOCKS, 20)
        print(f"{NUM_BLOCKS} blocks, all changed: {sorted(times)[len(times) // 2]:.1f} ms")
        browser.quit()
        server.terminate()


def take_screenshot(browser: Any, url: str, path: Path) -> None:
    """Conversations that share a system prompt, some of them ended."""
    browser.get(f"{url}/cache")
    system = "You are a patient teacher of physics who explains with everyday examples. " * 8
    questions = ("Why is the sky blue?", "What is heat?", "How do magnets work?", "What is sound?")
    for num_tokens in (60, 700):
        threads = [
            threading.Thread(target=ask, args=(url, system, q, num_tokens)) for q in questions
        ]
        for thread in threads:
            thread.start()
        if num_tokens < 100:
            for thread in threads:
                thread.join()
    time.sleep(3.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(path))


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
