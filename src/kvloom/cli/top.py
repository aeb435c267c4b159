"""`kvloom top`: what a running server's cache holds, in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvloom.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR_CELLS = 40
_MAX_ROWS = 20


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "top",
        help="watch a running server's KV cache",
        description="Watch the KV cache of a running server. Ctrl-C ends it.",
    )
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        help="the server's address (default: %(default)s)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's key, if it asks for one")
    parser.add_argument("--once", action="store_true", help="print the state once and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw every update of the server's."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with closing(_states(args.url.rstrip("/"), args.api_key)) as states:
        pool = next(states)
        if args.once:
            console.print(_draw(pool, next(states)))
            return 0
        with Live(console=console, auto_refresh=False) as live:
            for update in states:
                live.update(_draw(pool, update), refresh=True)
    return 0


def _states(url: str, api_key: str | None) -> Generator[dict[str, Any], None, None]:
    """The pool, then its updates, until the server ends."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urlopen(Request(f"{url}/cache/events", headers=headers), timeout=30) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])
    except HTTPError as error:
        hint = "; give it with --api-key" if error.code == 401 else ""
        raise ConfigError(f"{url} answers {error.code} {error.reason}{hint}") from None
    except (URLError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no server answers at {url} ({reason}); give its address") from None


def _draw(pool: dict[str, Any], update: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    num_usable = pool["num_blocks"] - 1
    used, queried = update["num_used_blocks"], update["num_queried_tokens"]
    hits = f"{update['num_hit_tokens'] / queried:.0%}" if queried else "-"
    groups = ", ".join(
        f"{g['kind']} ({g['num_layers']} layers, {g['block_size']} tokens a block)"
        for g in pool["groups"]
    )
    table = Table(title=f"step {update['num_steps']}", title_justify="left", expand=False)
    for name in ("request", "status", "prompt", "cached", "output", "of", "preempted"):
        table.add_column(name, justify="left" if name in {"request", "status"} else "right")
    for request in update["requests"][:_MAX_ROWS]:
        num_output = request["num_tokens"] - request["num_prompt_tokens"]
        table.add_row(
            request["id"],
            request["status"],
            str(request["num_prompt_tokens"]),
            str(request["num_cached_tokens"]),
            str(num_output),
            str(request["max_tokens"]),
            str(request["num_preemptions"]),
        )
    return Group(
        f"blocks  {_bar(used, num_usable)} {used} of {num_usable} in use",
        f"prefix  {hits} of {queried} prompt tokens found in the cache",
        f"choices {update['num_running']} run, {update['num_waiting']} wait, "
        f"{update['num_preemptions']} preemptions",
        f"groups  {groups}",
        table,
    )


def _bar(num: int, total: int) -> str:
    num_cells = round(_BAR_CELLS * num / total) if total else 0
    return "#" * num_cells + "." * (_BAR_CELLS - num_cells)
