"""llama.cpp's server as an engine: batches of texts in, texts out."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

HOST = "127.0.0.1"
START_SECONDS = 120


class LlamaServer:
    """A running `llama-server`; it ends with the session of this process."""

    def __init__(self, model: str, folder: str, arguments: Sequence[str]) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it does not; its own messages say why.
        """
        self._port = free_port()
        address = ["--host", HOST, "--port", str(self._port)]
        self._process = subprocess.Popen(
            [os.path.join(folder, "llama-server"), "--model", model, *address, *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": folder},
            stdin=subprocess.DEVNULL,
        )
        end = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("llama-server did not start")
            time.sleep(0.05)

    def complete(
        self, prompts: Sequence[str], num_tokens: int, ignores_eos: bool
    ) -> list[dict[str, Any]]:
        """Complete texts greedily in one request; the answers come in prompt order.

        Raises:
            RuntimeError: the server refused.
        """
        body = {
            "prompt": list(prompts),
            "n_predict": num_tokens,
            "ignore_eos": ignores_eos,
            # The cheapest way to be greedy: the usual chain of samplers would cost it time.
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
        }
        answer = self._ask("POST", "/completion", json.dumps(body))
        results = answer if isinstance(answer, list) else [answer]
        return sorted(results, key=lambda result: int(result["index"]))

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def _ask(self, method: str, path: str, body: str | None = None) -> Any:
        connection = http.client.HTTPConnection(HOST, self._port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise RuntimeError(f"llama-server answers {response.status}: {text}")
        return json.loads(text)

    def _is_ready(self) -> bool:
        try:
            self._ask("GET", "/health")
        except (OSError, RuntimeError):
            return False
        return True


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
