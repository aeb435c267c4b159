"""vLLM over kvloom, vLLM's own CPU backend and AMD's PACE plugin, in turn: text first, then time.

    bench/vllm_plugin.py --python PYTHON --peers FOLDER --models FOLDER [--out FOLDER]

PYTHON is of an environment that holds vLLM and kvloom, such as `scripts/test --vllm` makes; the
other two are environments `vllm` and `pace` below FOLDER. How it is measured: see `peers.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from peers import Bench, check_texts, close_engines, run_rounds, start_engines
from peers_cells import CELLS, ENOUGH_OF_LIMIT, MODELS, Bar, Cell
from peers_engines import STATED_PEAKS, Places, engine_commands, engine_formats, read_model_size
from peers_probe import Probe
from peers_process import EngineCommand
from peers_prompts import PromptMaker
from peers_report import Results, noise_lines, rates_table, ratio
from peers_start import make_parser, prepare

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
    parser = make_parser(__doc__, "build/vllm-plugin", num_rounds=5)
    parser.add_argument("--python", type=Path, required=True, help="of vLLM with the plugin")
    parser.add_argument("--engines", default=f"{OURS},vllm,pace", help="comma separated")
    parser.add_argument("--cells", default="0,1", help="0: one request, 1: 32 requests")
    return parser.parse_args()


def main() -> None:
    """Check texts, run the rounds, print the report."""
    arguments = parse_arguments()
    places = prepare(arguments, MODELS["smollm2"])
    tokenizer = load_tokenizer(open_checkpoint(places.gguf))
    # Not resolved: an environment's python is a link, and knows its environment by its own name.
    commands = make_commands(arguments.python.absolute(), places)
    probe = Probe(arguments.threads)
    cells = [bench_cells()[int(i)] for i in arguments.cells.split(",")]
    engines = start_engines(arguments.engines.split(","), commands, arguments.out)
    try:
        if not arguments.no_text:
            print("\n".join(check_texts(engines, tokenizer, places)), flush=True)
        if not arguments.rounds:
            return
        bench = Bench(engines, cells, PromptMaker(tokenizer), probe, arguments.threads)
        samples = run_rounds(bench, arguments.rounds, arguments.out / "samples.json")
    finally:
        close_engines(engines)
    formats = engine_formats(places, {})
    formats[OURS] = formats["kvloom-bf16"]
    results = Results(samples, read_model_size(places), formats, peaks=STATED_PEAKS)
    print("\n".join(["", *bar_lines(results), "", *rates_table(results), ""]))
    print("\n".join(noise_lines(results)))


if __name__ == "__main__":
    main()
