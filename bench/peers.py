"""kvloom and what a user would pick instead, in turn: text first, then time.

    bench/peers.py --peers FOLDER --models FOLDER [--model smollm2|gemma3] [--out FOLDER]

FOLDER of --peers holds an environment per peer: vllm, pace, openvino (each with bin/python) and
llama-bin. FOLDER of --models holds what MODELS names: a GGUF file and the same weights in bf16.

Fairness: each engine is one process, started once and stopped (SIGSTOP) while others run; it runs
every cell once before anything counts. A round runs cell by cell, and in a cell all engines one
after another, in an order that rotates; so both times of a ratio are taken within a minute or so.
Prompts are texts that no engine has seen before, the same for all of them. What is timed is a call
from texts to texts. All engines get the same processors, and 1 GiB of KV cache or more than they
need. A run that other processes disturbed is repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import text_check
from peers_cells import CELLS, MODELS, Cell
from peers_engines import STATED_PEAKS, Places, engine_commands, engine_formats
from peers_engines import read_model_size as read_size
from peers_folder import folder_that_begins_as
from peers_probe import Probe
from peers_process import (
    TICK_SECONDS,
    EngineCommand,
    EngineError,
    EngineProcess,
    busy_seconds,
)
from peers_prompts import PromptMaker
from peers_report import QUIET_SHARE, Results, Sample, report
from peers_start import make_parser, prepare

from kvloom.tokenizer import load_tokenizer
from kvloom.weights.checkpoint import open_checkpoint

MAX_TRIES = 3
WARM_UP = -1  # its round


@dataclass(slots=True)
class Bench:
    """Everything that a round needs."""

    engines: Sequence[EngineProcess]
    cells: Sequence[Cell]
    prompts: PromptMaker
    probe: Probe
    num_threads: int

    def run_round(self, number: int) -> list[Sample]:
        """Every cell by every engine; the order of engines rotates with the round's number."""
        turn = number % len(self.engines)
        order = [*self.engines[turn:], *self.engines[:turn]]
        samples = []
        for cell in self.cells:
            for engine in order:
                samples.append(self._sample(number, cell, engine))
                say(sample_line(samples[-1], cell))
        return samples

    def _sample(self, number: int, cell: Cell, engine: EngineProcess) -> Sample:
        """The first run that nothing else disturbed, or the last one tried."""
        for attempt in range(1 if number == WARM_UP else MAX_TRIES):
            # The same texts for all engines, unless a run is repeated.
            sample = self._run(number, cell, engine, f"{number} {cell.name} {attempt}")
            if sample.foreign_share <= QUIET_SHARE:
                break
        return sample

    def _run(self, number: int, cell: Cell, engine: EngineProcess, seed: str) -> Sample:
        prompts = self.prompts.make(cell.num_requests, cell.num_prompt_tokens, seed)
        before = self.probe.rates()
        busy, own = busy_seconds(), engine.cpu_seconds()
        answer = engine.run({"prompts": prompts, "num_output_tokens": cell.num_output_tokens})
        foreign = (busy_seconds() - busy) - (engine.cpu_seconds() - own) - TICK_SECONDS
        after = self.probe.rates()
        check_counts(engine.name, cell, answer)
        seconds = answer["seconds"]
        return Sample(
            round=number,
            cell=cell.name,
            engine=engine.name,
            seconds=seconds,
            read_bytes_per_s=(before.read_bytes_per_s + after.read_bytes_per_s) / 2,
            bf16_flop_per_s=fmean(one.peaks.bf16 for one in (before, after)),
            int8_op_per_s=fmean(one.peaks.int8 for one in (before, after)),
            foreign_share=max(0.0, foreign) / (seconds * self.num_threads),
        )


def check_counts(name: str, cell: Cell, answer: Mapping[str, Any]) -> None:
    """All engines must read the same number of tokens, and write all that were asked for.

    Raises:
        EngineError: one did not.
    """
    wanted = (
        cell.num_requests * cell.num_prompt_tokens,
        cell.num_requests * cell.num_output_tokens,
    )
    counted = (answer["num_prompt_tokens"], answer["num_output_tokens"])
    if counted != wanted or len(answer["texts"]) != cell.num_requests:
        raise EngineError(
            f"{name}, {cell.name}: {counted} prompt and output tokens and "
            f"{len(answer['texts'])} texts, not {wanted} and {cell.num_requests}"
        )


def sample_line(sample: Sample, cell: Cell) -> str:
    """One run, for who watches."""
    return (
        f"round {sample.round} {sample.cell:16} {sample.engine:14} {sample.seconds:8.3f} s "
        f"{cell.num_counted_tokens / sample.seconds:8.1f} tok/s at "
        f"{sample.read_bytes_per_s / 1e9:5.1f} GB/s, others {sample.foreign_share:.0%}"
    )


def say(line: str) -> None:
    """To who watches; the report alone goes to standard output."""
    print(line, file=sys.stderr, flush=True)


def with_equal_prompts(places: Places, tokenizer: Any, out: Path) -> Places:
    """Folder and file make the same tokens of a text; `tokenizer` is the file's."""
    own = load_tokenizer(open_checkpoint(places.folder))
    folder = folder_that_begins_as(tokenizer, own, places.folder, out / "model")
    return replace(places, model=replace(places.model, folder=str(folder)))


def start_engines(
    names: Sequence[str], commands: Mapping[str, EngineCommand], out: Path
) -> list[EngineProcess]:
    """Start all of them, one after another."""
    engines: list[EngineProcess] = []
    try:
        for name in names:
            engines.append(EngineProcess(name, commands[name], out / f"{name}.log"))
            say(f"{name}: ready after {engines[-1].start():.1f} s")
    except BaseException:
        close_engines(engines)
        raise
    return engines


def close_engines(engines: Sequence[EngineProcess]) -> None:
    """End all of them."""
    for engine in engines:
        engine.close()


def check_texts(engines: Sequence[EngineProcess], tokenizer: Any, places: Places) -> list[str]:
    """The text check's lines of the report."""
    prompts = list(text_check.QUESTIONS)
    if tokenizer.has_chat_template:
        chats = [[{"role": "user", "content": question}] for question in prompts]
        prompts = written = [tokenizer.render_chat(chat) for chat in chats]
    else:  # engines add what begins a text by themselves; to score it, it is written out
        ids = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
        written = [tokenizer.decode(one, skip_special_tokens=False) for one in ids]
    command = {"prompts": prompts, "max_tokens": text_check.MAX_TOKENS}
    texts = {engine.name: engine.run(command)["texts"] for engine in engines}
    for name, answers in texts.items():
        for answer in answers:
            say(f"{name}: {answer!r}")
    scores = text_check.score_texts(places.python("vllm"), places.folder, written, texts)
    return text_check.report_lines(scores)


def run_rounds(bench: Bench, num_rounds: int, path: Path) -> list[Sample]:
    """The warm-up, then all rounds; samples are on disk after each of them."""
    samples: list[Sample] = []
    bench.run_round(WARM_UP)
    for number in range(num_rounds):
        samples += bench.run_round(number)
        path.write_text(json.dumps([asdict(sample) for sample in samples]))
    return samples


def print_report(samples: Sequence[Sample], places: Places, options: Any) -> None:
    """Tables with the limits at the stated peaks of arithmetic, and at those of this machine."""
    size, formats = read_size(places), engine_formats(places, options)
    stated = f"{STATED_PEAKS.bf16 / 1e9:.0f} GFLOP/s bf16, {STATED_PEAKS.int8 / 1e9:.0f} GOP/s int8"
    for title, peaks in ((f"{stated} (stated)", STATED_PEAKS), ("what was probed", None)):
        if peaks is None and not all(s.bf16_flop_per_s and s.int8_op_per_s for s in samples):
            continue  # a processor without these instructions
        print(f"\n## Limits with {title}\n")
        print("\n".join(report(Results(samples, size, formats, places.model.bars, peaks))))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "build/peers", num_rounds=5)
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="which of them")
    parser.add_argument("--engines", help="comma separated; all that the model has bars for")
    parser.add_argument("--cells", default="", help="indices of cells, comma separated; all")
    parser.add_argument("--options", default="{}", help="of kvloom's LLM, as JSON")
    parser.add_argument("--report", type=Path, help="samples of an earlier run: print, run nothing")
    return parser.parse_args()


def main() -> None:
    """Check texts, run the rounds, print the report."""
    arguments = parse_arguments()
    places = prepare(arguments, MODELS[arguments.model])
    options = json.loads(arguments.options)
    if arguments.report:
        samples = [Sample(**fields) for fields in json.loads(arguments.report.read_text())]
        print_report(samples, places, options)
        return
    names = arguments.engines.split(",") if arguments.engines else places.model.engines
    cells = [CELLS[int(i)] for i in arguments.cells.split(",") if i] or CELLS
    tokenizer = load_tokenizer(open_checkpoint(places.gguf))
    prompts = PromptMaker(tokenizer)
    places = with_equal_prompts(places, tokenizer, arguments.out)
    engines = start_engines(names, engine_commands(places, options), arguments.out)
    try:
        lines = [] if arguments.no_text else check_texts(engines, tokenizer, places)
        print("\n".join(["## Text", "", *lines]), flush=True)
        if not arguments.rounds:
            return
        bench = Bench(engines, cells, prompts, Probe(arguments.threads), arguments.threads)
        samples = run_rounds(bench, arguments.rounds, arguments.out / "samples.json")
    finally:
        close_engines(engines)
    print_report(samples, places, options)


if __name__ == "__main__":
    main()
