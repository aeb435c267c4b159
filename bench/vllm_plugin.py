"""vLLM over kvloom, vLLM's own CPU backend and AMD's PACE plugin, in turn: text first, then time.

    bench/vllm_plugin.py --python PYTHON --peers FOLDER --models FOLDER [--out FOLDER]

PYTHON is of an environment that holds vLLM and kvloom, such as `scripts/test --vllm` makes; the
other two are environments `vllm` and `pace` below FOLDER. How it is measured: see `peers.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from peers import Bench, check_texts, close_engines, run_rounds, say
from peers_cells import CELLS, ENOUGH_OF_LIMIT, MODELS, Bar, Cell
from peers_engines import STATED_PEAKS, Places, engine_commands, engine_formats, read_model_size
from peers_probe import Probe
from peers_process import EngineCommand, EngineProcess
from peers_prompts import PromptMaker
from peers_report import Results, noise_lines, rates_table, ratio

from kvloom.tokenizer import load_tokenizer
from kvloom.weights.checkpoint import open_checkpoint

OURS = "kvloom-vllm"
# How many times faster, in the cells of one request and of 32 requests of 128 + 128 tokens.
BARS = {"vllm": (2.0, 2.4), "pace": (1.6, 1.4)}
SIZES = ((1, 128, 128), (32, 128, 128))


def bench_cells() -> list[Cell]:
    """Those of `peers.py` that are compared."""
    sizes = {(c.num_requests, c.num_prompt_tokens, c.num_output_tokens): c for c in CELLS}
    return [sizes[size] for size in SIZES]


def make_commands(python: Path, places: Places) -> dict[str, EngineCommand]:
    """The peers' own, and the same vLLM with the plugin."""
    peers = engine_commands(places, {})
    plain = peers["vllm"]
    environment = {k: v for k, v in plain.environment.items() if k != "VLLM_PLUGINS"}
    ours = replace(plain, python=str(python), environment=environment)
    return {OURS: ours, "vllm": plain, "pace": peers["pace"]}


def bar_lines(results: Results) -> list[str]:
    """Ratios beside what they must be."""
    lines = []
    for peer, needed in BARS.items():
        for cell, least in zip(bench_cells(), needed, strict=True):
            bar = Bar(peer, OURS, (peer,), ())
            measured = ratio(results, cell, bar)
            if measured is None:
                continue
            share = results.limit_share(cell, OURS) or 0.0
            passes = measured >= least or (cell.num_requests == 1 and share >= ENOUGH_OF_LIMIT)
            lines.append(
                f"{cell.name} against {peer}: {measured:.2f} x of {least:g} x, at {share:.0%} of "
                f"the limit: {'pass' if passes else 'SHORT'}"
            )
    return lines


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="of vLLM with the plugin")
    parser.add_argument("--peers", type=Path, required=True, help="the peers' environments")
    parser.add_argument("--models", type=Path, required=True, help="GGUF file and smollm2-hf")
    parser.add_argument("--out", type=Path, default=Path("build/vllm-plugin"), help="logs, samples")
    parser.add_argument("--engines", default=f"{OURS},vllm,pace", help="comma separated")
    parser.add_argument("--cells", default="0,1", help="0: one request, 1: 32 requests")
    parser.add_argument("--rounds", type=int, default=5, help="0 for the text check alone")
    parser.add_argument("--threads", type=int, default=2, help="processors that engines may use")
    parser.add_argument("--no-text", action="store_true", help="leave the text check out")
    return parser.parse_args()


def main() -> None:
    """Check texts, run the rounds, print the report."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    places = Places(
        arguments.peers.resolve(), arguments.models.resolve(), MODELS["smollm2"], arguments.threads
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(open_checkpoint(places.gguf))
    # Not resolved: an environment's python is a link, and knows its environment by its own name.
    commands = make_commands(arguments.python.absolute(), places)
    probe = Probe(arguments.threads)
    cells = [bench_cells()[int(i)] for i in arguments.cells.split(",")]
    engines: list[EngineProcess] = []
    try:
        for name in arguments.engines.split(","):
            engines.append(EngineProcess(name, commands[name], arguments.out / f"{name}.log"))
            say(f"{name}: ready after {engines[-1].start():.1f} s")
        if not arguments.no_text:
            print("\n".join(check_texts(engines, tokenizer, places)), flush=True)
        if not arguments.rounds:
            return
        bench = Bench(engines, cells, PromptMaker(tokenizer), probe, arguments.threads)
        samples = run_rounds(bench, arguments.rounds, arguments.out / "samples.json")
    finally:
        close_engines(engines)
    formats = engine_formats(places, {}, STATED_PEAKS)
    results = Results(samples, read_model_size(places), formats | {OURS: formats["kvloom-bf16"]})
    print("\n".join(["", *bar_lines(results), "", *rates_table(results), ""]))
    print("\n".join(noise_lines(results)))


if __name__ == "__main__":
    main()
