"""Options for where work runs: those of every engine, and those of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from howsmooth.cli.console import parse_bytes, print_json, print_line
from howsmooth.cli.options import engine_option
from howsmooth.engines import Engine
from howsmooth.errors import InvalidInput

_ENGINES_OF = {
    "partition": ("slurm",),
    "time": ("slurm",),
    "job_memory": ("slurm",),
    "cores": ("slurm", "ray"),
    "address": ("ray",),
}
"""Option → the engines that take it."""


@dataclass(frozen=True)
class EngineOptions:
    """The workers: this process, several processes, or a cluster."""

    jobs: Annotated[
        int | None,
        engine_option(min=1, max=10_000, help="Workers: processes, tasks of a SLURM array or of Ray at a time (1)."),
    ] = None
    engine: Annotated[
        str | None, engine_option(help="processes (on this machine), slurm or ray; slurm and ray are extras.")
    ] = None
    cores: Annotated[
        int | None, engine_option(min=1, max=1024, help="Cores, and threads of torch, of a task of SLURM or Ray (1).")
    ] = None
    address: Annotated[str | None, engine_option(help="Address of the Ray cluster (one is started here).")] = None
    partition: Annotated[str | None, engine_option(help="Partition of SLURM jobs (the cluster's own choice).")] = None
    time: Annotated[int | None, engine_option(min=1, help="Minutes for a SLURM job (60).")] = None
    job_memory: Annotated[str | None, engine_option(help="Memory of a SLURM job, for example 8GB (4GB).")] = None

    def chosen(self) -> Engine | None:
        """The engine; None for this process."""
        for name, engines in _ENGINES_OF.items():
            if getattr(self, name) is not None and self.engine not in engines:
                flag, hint = name.replace("_", "-"), "; on this machine, --threads are divided" * (name == "cores")
                raise InvalidInput(f"--{flag} is for --engine {' or '.join(engines)}: add that, or leave it out{hint}.")
        if self.engine is None and self.jobs in (None, 1):
            return None
        named: dict[str, Any] = {"kind": self.engine, "jobs": self.jobs, "address": self.address}
        size = None if self.job_memory is None else max(1, parse_bytes(self.job_memory) // 10**6)
        named |= {"partition": self.partition, "time": self.time, "memory": size, "threads": self.cores}
        return Engine(**{name: value for name, value in named.items() if value is not None})


@dataclass(frozen=True)
class ScanEngineOptions(EngineOptions):
    """The workers of a scan, and the part of it that they measure."""

    timeout: Annotated[
        float | None, engine_option(min=0.1, help="Seconds after which a worker gives up a unit (3600).")
    ] = None
    shard: Annotated[
        str | None, engine_option(help="Measure part i of N, as i/N; slurm: the part of this task of a job array.")
    ] = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `howsmooth.scan`."""
        options = {"timeout": self.timeout, "shard": self.shard, "executor": self.chosen()}
        return {name: value for name, value in options.items() if value is not None}


def print_plan(model: str, out: Path, wanted: dict[str, Any], workers: ScanEngineOptions, as_json: bool) -> None:
    """Print the number of cells, time and memory, and a script that measures them as a job array."""
    import torch

    from howsmooth.scans.cost import predict, sbatch_script
    from howsmooth.scans.plan import ScanOptions
    from howsmooth.scans.run import prepare
    from howsmooth.scans.units import parse_shard

    options = {name: value for name, value in wanted.items() if name not in ("reference", "device", "dtype")}
    text, lengths = options.pop("text", None), options.pop("length", None)
    ready = prepare(model, text, ScanOptions(lengths=lengths, **options))
    plan = ready.plan if workers.shard is None else parse_shard(workers.shard).part(ready.plan)
    prediction = predict(ready, plan, workers.jobs or 1)
    flags = [word for name, value in wanted.items() for word in _flag(name, value)]
    command = ["howsmooth", "scan", model, *flags]
    script = sbatch_script(command, prediction, workers.jobs or 1, workers.cores or torch.get_num_threads(), str(out))
    if as_json:
        print_json(vars(prediction) | {"wall": prediction.wall, "script": script})
    else:
        print_line(f"{prediction}.\n\n{script}")


def _flag(name: str, value: Any) -> list[str]:
    """An option as it is written on a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
