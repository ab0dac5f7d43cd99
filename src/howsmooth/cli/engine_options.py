"""Where work runs: options that every engine understands, and those of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from howsmooth.cli.console import parse_bytes, print_json, print_line
from howsmooth.engines import Engine
from howsmooth.errors import InvalidInput


@dataclass(frozen=True)
class Place:
    """Who works: this process, several, or a cluster."""

    jobs: Annotated[
        int | None,
        Option(min=1, max=10_000, help="Workers: processes, tasks of a SLURM array or of Ray at a time (1)."),
    ] = None
    engine: Annotated[
        str | None, Option(help="processes (on this machine), slurm or ray; slurm and ray are extras.")
    ] = None
    cores: Annotated[
        int | None, Option(min=1, max=1024, help="Cores, and threads of torch, of a task of SLURM or Ray (1).")
    ] = None
    address: Annotated[str | None, Option(help="Of the Ray cluster (one is started here).")] = None
    partition: Annotated[str | None, Option(help="Of SLURM jobs (the cluster's own choice).")] = None
    time: Annotated[int | None, Option(min=1, help="Minutes for a SLURM job (60).")] = None
    memory: Annotated[str | None, Option(help="Memory of a SLURM job, for example 8GB (4GB).")] = None

    def engine_asked(self) -> Engine | None:
        """That of the options; None for this process."""
        of_slurm = {"partition": self.partition, "time": self.time, "memory": self.memory}
        given = [name for name, value in of_slurm.items() if value is not None]
        if given and self.engine != "slurm":
            raise InvalidInput(f"--{given[0]} is for --engine slurm: add that, or leave it out.")
        if self.cores is not None and self.engine not in ("slurm", "ray"):
            raise InvalidInput("--cores is for --engine slurm and ray: on this machine, --threads are divided.")
        if self.address is not None and self.engine != "ray":
            raise InvalidInput("--address is for --engine ray: add that, or leave it out.")
        if self.engine is None and self.jobs in (None, 1):
            return None
        named: dict[str, Any] = {"kind": self.engine, "jobs": self.jobs, "address": self.address}
        size = None if self.memory is None else max(1, parse_bytes(self.memory) // 10**6)
        named |= of_slurm | {"memory": size, "threads": self.cores}
        return Engine(**{name: value for name, value in named.items() if value is not None})


@dataclass(frozen=True)
class Workers(Place):
    """Who measures the units of a scan, or which part of it."""

    timeout: Annotated[float | None, Option(min=0.1, help="Seconds after which a worker gives up a unit (3600).")] = (
        None
    )
    shard: Annotated[
        str | None, Option(help="Measure part i of N, as i/N; slurm: the part of this task of a job array.")
    ] = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `howsmooth.scan`."""
        options: dict[str, Any] = {}
        if self.timeout is not None:
            options["timeout"] = self.timeout
        if self.shard is not None:
            options["shard"] = self.shard
        engine = self.engine_asked()
        return options | ({} if engine is None else {"executor": engine})


def print_plan(model: str, out: Path, wanted: dict[str, Any], workers: Workers, as_json: bool) -> None:
    """How many cells, how long, how much memory; and a script that measures them as a job array."""
    import torch

    from howsmooth.scans.cost import predict, sbatch_script
    from howsmooth.scans.prepare import prepare
    from howsmooth.scans.scan_options import ScanOptions
    from howsmooth.scans.shards import parse_shard

    asked = {name: value for name, value in wanted.items() if name not in ("reference", "device", "dtype")}
    ready = prepare(model, asked.pop("text", None), ScanOptions(**asked))
    plan = ready.plan if workers.shard is None else parse_shard(workers.shard).part(ready.plan)
    prediction = predict(ready.model, plan, ready.cut, ready.settings, workers.jobs or 1)
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
