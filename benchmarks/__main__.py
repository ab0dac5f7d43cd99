"""``python -m benchmarks``: run the sections, print them, and write ``benchmarks/results.md``."""

from __future__ import annotations

import argparse
import importlib
import os

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.report import PAGE, targets_table, write_page

SECTIONS = (
    "one_product",
    "heads",
    "layer",
    "small",
    "long",
    "three_path",
    "scan",
    "worst_case",
    "attention_layers",
    "monitor",
    "rounding",
    "engines",
    "whole",
    "skipping",
    "grid",
    "certified_radii",
)
SLOW_SECTIONS = ("measure_long", "measure_huge")


def main() -> None:
    """Parse the options, run what they name, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=None, help="run only these (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that everything runs; records nothing"
    )
    parser.add_argument("--long", action="store_true", help="only the full measurement at n = 32,768 (minutes)")
    parser.add_argument("--huge", action="store_true", help="only the full measurement at n = 131,072 (long)")
    parser.add_argument("--threads", type=int, default=machine.cores(), help="threads of torch (default: all cores)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the processes that measure memory
    slow = [name for name, wanted in zip(SLOW_SECTIONS, (options.long, options.huge), strict=True) if wanted]
    names = [*(options.section or (() if slow else SECTIONS)), *slow]
    console = Console()
    done = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        for i, name in enumerate(names, 1):
            task = progress.add_task(name)

            def report(what: str, name: str = name, i: int = i, task: TaskID = task) -> None:
                progress.update(task, description=f"[{i}/{len(names)}] {name}: {what}")

            described = machine.describe()
            section = importlib.import_module(f"benchmarks.{name}").run(options.quick, report)
            section.machine, section.date = described, machine.today()
            progress.remove_task(task)
            console.print(Markdown(section.markdown()))
            done.append(section)
            if not options.quick:
                section.record()
                write_page((*SECTIONS, *SLOW_SECTIONS))
    console.print(Markdown(targets_table(done).markdown()))
    console.print("Small sizes: nothing recorded." if options.quick else f"Written to {os.path.relpath(PAGE)}.")


if __name__ == "__main__":
    main()
