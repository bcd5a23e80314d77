"""The command `scripts/bench`: run one benchmark, or all; print a table, and with `--json` one JSON line last.

`all` gives each benchmark a process of its own and writes what it found into bench/results/.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.child import ROOT
from bench.measure import as_line, as_page
from twinstep.spec.errors import TwinstepError

RESULTS = Path(__file__).parent / "results"
ALL = "all"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark: a module with `run(*, say)`, which returns the result, and `table(result)`."""

    module: str
    says: str
    """One line for --help."""
    keeps: bool = False
    """Whether it takes `--keep`."""
    parts: bool = False
    """Whether it takes `--only`."""


BENCHES = {
    "step": Bench("bench.step", "one DLRMv3 train step: eager, torch.compile, ours on Inductor and on XLA"),
    "recompile": Bench("bench.recompile", "until a step has run: cold, warm start, a shape seen before"),
    "depth": Bench("bench.depth", "compiling DLRMv3's step with 2 to 20 layers, folded into one and not"),
    "attention": Bench("bench.attention", "HSTU attention on uneven rows: the jagged operator over padded dense"),
    "tpu": Bench(
        "bench.tpu",
        "train steps compiled for TPU slices by the TPU compiler: seconds, memory, traffic, overlap",
        parts=True,
    ),
    "preflight": Bench(
        "bench.preflight", "a device's memory: the analytic model against the TPU compiler's report", parts=True
    ),
    "sparse": Bench("bench.sparse", "a table of 1,000,000 × 64 by Adagrad: eager, its sparse gradients, ours"),
    "table-size": Bench("bench.table_size", "the same step with 2,000,000 and with 20,000 rows: time and memory"),
    "checkpoint": Bench("bench.checkpoint", "saving and restoring, beside the disk; stall and resume of a run"),
    "goodput": Bench("bench.goodput", "useful step time over wall time of a ten-minute run that is killed once"),
    "api": Bench("bench.api", "what a control plane bears: submits, passes, followers, reports, charts, plans"),
    "preprocess": Bench("bench.preprocess", "ids to SparseCore buffers: ours over jax-tpu-embedding's compiled code"),
    "hybrid": Bench("bench.hybrid", "a step in two processes, the next batch's ids on their way or not"),
    "loader": Bench("bench.loader", "batches packed against batches a step takes, on one core"),
    "engine": Bench(
        "bench.engine", "SparseCore engine: a step with preprocessing ahead of it over the slower of the two"
    ),
    "pipeline": Bench("bench.pipeline", "what stale lookups cost: SparseCore pipeline full and off on real ratings"),
    "quality": Bench(
        "bench.quality", "held-out AUC and NE of a tuned job over seeds, on both splits, beside baselines", keeps=True
    ),
}

OPTIONS = {"keep": ("keeps", "keeps nothing between calls"), "only": ("parts", "has no parts that run alone")}
"""Options of some benchmarks: the field of those that take one, and what is said of the others."""


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1 failed, 2 wrong usage, 130 interrupted."""
    options = parser().parse_args(argv)
    names = [*BENCHES, ALL]
    if options.name not in names:
        near = difflib.get_close_matches(options.name, names, n=1, cutoff=0.0)
        print(f"bench: there is no benchmark named {options.name!r}", file=sys.stderr)
        print(f"fix: did you mean {near[0]!r}? there are: {', '.join(names)}", file=sys.stderr)
        return EXIT_USAGE
    asked = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
    for option in asked:
        field, problem = OPTIONS[option]
        able = [name for name, bench in BENCHES.items() if getattr(bench, field)]
        if options.name not in able:
            fix = f"leave --{option} out; {' and '.join(able)} {'do' if len(able) > 1 else 'does'}"
            print(f"bench: {options.name} {problem}\nfix: {fix}", file=sys.stderr)
            return EXIT_USAGE
    try:
        if options.name == ALL:
            return run_all(as_json=options.json)
        return run_one(options.name, as_json=options.json, **asked)
    except TwinstepError as error:
        print(f"bench: {error.problem}\nfix: {error.remedy}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    lines = [f"  {name:<10} {bench.says}" for name, bench in BENCHES.items()]
    lines.append(f"  {ALL:<10} all of them, one after the other, into bench/results/")
    made = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure one thing against its peers, in interleaved runs.",
        epilog="benchmarks:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", metavar="NAME", help="a benchmark from the list below")
    made.add_argument("--json", action="store_true", help="end with one JSON line")
    made.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep what is done there, and go on from it")
    made.add_argument("--only", metavar="PATTERN", help="run such parts alone, 'v5p-*-ring'; others stay as kept")
    return made


def run_one(name: str, *, as_json: bool, **asked: Any) -> int:
    """Run one benchmark here; 1 if its sides did not do the same work.

    Args:
        asked: options that the benchmark takes.

    Raises:
        TwinstepError: it cannot be run.
    """
    module = importlib.import_module(BENCHES[name].module)
    errors = Console(stderr=True)

    def say(text: str) -> None:
        errors.print(f"{name}: {text}", style="dim", highlight=False)

    found: dict[str, Any] = module.run(say=say, **asked)
    Console(width=None if sys.stdout.isatty() else 120).print(module.table(found))
    if not found.get("equal", True):
        print("bench: the sides came to different results, so their times do not compare", file=sys.stderr)
    if as_json:
        print(as_line(found), flush=True)
    return 0 if found.get("equal", True) else EXIT_FAILED


def run_all(*, as_json: bool, results: Path = RESULTS) -> int:
    """Run every benchmark in a process of its own and write its result; go on where one fails, and return 1 then."""
    found: dict[str, Any] = {}
    for name in BENCHES:
        command = [sys.executable, "-m", "bench", name, "--json"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            *page, last = process.stdout.read().splitlines() or [""]
        print("\n".join(page), flush=True)
        if process.returncode:
            print(f"bench: {name} failed; its file in {results.name}/ is as it was", file=sys.stderr)
            continue
        found[name] = json.loads(last)
        results.mkdir(exist_ok=True)
        (results / f"{name}.json").write_text(as_page(found[name]))
    if as_json:
        print(as_line(found), flush=True)
    return 0 if len(found) == len(BENCHES) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
