"""The benchmark suite: every benchmark, contestants in turn, ratios first; a table, JSON and a chart.

    .venv/bin/python tests/sweeps/benchmarks/run.py [--rounds N] [--only WORD …] [--write]

With --write the table and the chart go to docs (benchmarks.md, benchmarks.svg, benchmarks.json); what was not measured
stays as it was. Run it on a machine that does nothing else: the table says which load it met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib as mpl

from sweeps.benchmarks import evaluation_cost, save_stall, startup_cost, step_cost, throughput
from sweeps.benchmarks.measuring import Benchmark, Result, Row, measure

mpl.use("svg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[3] / "docs"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def all_benchmarks() -> list[Benchmark]:
    modules = (step_cost, evaluation_cost, startup_cost, save_stall, throughput)
    return [benchmark for module in modules for benchmark in module.benchmarks()]


def ours(result: Result) -> list[tuple[str, float]]:
    """Return our contestants' names and ratios."""
    return [(row.contestant, row.ratio) for row in result.rows if row.contestant.startswith("hf_compat")]


def table(results: list[Result]) -> str:
    lines = [
        "| benchmark | contestant | × transformers | goal | median | smallest to largest | unit | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in result.rows:
            goal = f"{result.goal:.2f}" if row.contestant == "hf_compat" else ""
            numbers = f"{row.median:,.4g} | {row.smallest:,.4g} to {row.largest:,.4g}"
            unit = result.unit.partition(";")[0]
            place = f"{result.name} | {row.contestant} | {row.ratio:.3f} | {goal}"
            lines.append(f"| {place} | {numbers} | {unit} | {result.load:.1f} |")
    return "\n".join(lines)


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def chart(results: list[Result], path: Path) -> None:
    """Draw our ratios as bars, the goal of each as a mark, transformers as a line at 1."""
    bars = [(f"{result.name}: {name}", ratio, result.goal) for result in results for name, ratio in ours(result)]
    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(bars) + 1))
    places = range(len(bars), 0, -1)
    axes.barh(places, [ratio for _, ratio, _ in bars], color="#4472c4", height=0.6)
    axes.plot([goal for *_, goal in bars], places, "|", color="black", markersize=12, label="goal")
    axes.axvline(1.0, color="gray", linewidth=1, label="transformers")
    axes.set_yticks(places, [name for name, *_ in bars], fontsize=7)
    axes.set_xlabel("cost × transformers' (smaller is better)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def with_earlier(results: list[Result]) -> list[Result]:
    """Return the results in the suite's order, and the earlier ones of what was not measured now."""
    earlier = json.loads((DOCS / "benchmarks.json").read_text())
    read = [Result(**{**entry, "rows": [Row(**row) for row in entry["rows"]]}) for entry in earlier]
    known = {result.name: result for result in [*read, *results]}
    return [known[benchmark.name] for benchmark in all_benchmarks() if benchmark.name in known]


def write(results: list[Result]) -> None:
    page = DOCS / "benchmarks.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\nOn {machine()}:\n\n{table(results)}\n\n{END}{after}")
    (DOCS / "benchmarks.json").write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    chart(results, DOCS / "benchmarks.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="measurements of each contestant; the benchmark's own by default")
    parser.add_argument("--only", nargs="*", default=[], help="benchmarks whose names hold one of these words")
    parser.add_argument("--write", action="store_true", help="write the table, the chart and the JSON into docs")
    options = parser.parse_args()
    chosen = [
        benchmark
        for benchmark in all_benchmarks()
        if not options.only or any(word in benchmark.name for word in options.only)
    ]
    print(f"{len(chosen)} benchmarks on {machine()}", flush=True)
    results = []
    for benchmark in chosen:
        results.append(measure(benchmark, options.rounds))
        print(results[-1].as_text(), flush=True)
    if options.write:
        write(with_earlier(results))


if __name__ == "__main__":
    main()
