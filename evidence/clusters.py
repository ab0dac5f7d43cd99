"""Real clusters on this machine, of several nodes that can be lost: SLURM's daemons and Ray's, started for a moment."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from howsmooth.engines import EngineError

NODES = 3
_SMALL: dict[str, Any] = {"object_store_memory": 100_000_000, "include_dashboard": False}
_SLURM = """ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=2
ReturnToService=2
MpiDefault=none
"""


class Nodes(Protocol):
    """A cluster of which a node can be lost and mended."""

    def lose(self, name: str) -> None:
        """Kill a node."""

    def mend(self, name: str) -> None:
        """Have another in its place."""


class SlurmCluster:
    """A scheduler and nodes n1, n2, …, each a daemon of its own on this machine; commands find it by SLURM_CONF."""

    def __init__(self, folder: Path, nodes: int = NODES):
        self.folder, self.names = folder, [f"n{number}" for number in range(1, nodes + 1)]
        host, ports = socket.gethostname().split(".")[0], _free_ports(nodes + 1)
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=8000 State=UNKNOWN"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        lines.append(f"PartitionName=all Nodes={','.join(self.names)} Default=YES State=UP")
        text = _SLURM.format(host=host, port=ports[0], folder=folder) + "\n".join(lines) + "\n"
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._scheduler = self._daemon("slurmctld", "-D", "-i")
        self._nodes = {name: self._daemon("slurmd", "-D", "-N", name) for name in self.names}

    def wait(self, seconds: float = 120.0) -> None:
        """Until all nodes are there."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            said = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%t"], capture_output=True, text=True, env=self._environment, check=False
            )
            if [state.strip("*") in ("idle", "mix", "alloc") for state in said.stdout.split()].count(True) == len(
                self.names
            ):
                return
            time.sleep(0.5)
        raise EngineError(f"SLURM's nodes did not come up within {seconds:g} s: {said.stdout} {said.stderr}")

    def lose(self, name: str) -> None:
        """All processes of a node killed at once, as if its power were cut; then the node begins anew, empty."""
        wanted = {f"SLURMD_NODENAME={name}", f"SLURM_CONF={self.folder / 'slurm.conf'}"}
        lost = [process for process in _processes() if wanted <= set(_read(process, "environ").split("\0"))]
        parents = {_parent(process) for process in lost} | {_parent(_parent(process)) for process in lost}
        steps = {process for process in parents if process > 1 and "slurmstepd" in _read(process, "cmdline")}
        for process in [self._nodes[name].pid, *steps, *lost]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._nodes[name].wait()

    def mend(self, name: str) -> None:
        """Start the daemon of a lost node, when the scheduler has noticed the loss."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit:
            said = subprocess.run(
                ["sinfo", "-h", "-n", name, "-o", "%T"],
                capture_output=True,
                text=True,
                env=self._environment,
                check=False,
            )
            if said.stdout.startswith("down"):
                break
            time.sleep(0.5)
        self._nodes[name] = self._daemon("slurmd", "-D", "-N", name)
        self.wait()

    def close(self) -> None:
        """End all daemons."""
        for daemon in (*self._nodes.values(), self._scheduler):
            daemon.terminate()
        for daemon in (*self._nodes.values(), self._scheduler):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        name = "-".join(word for word in command if not word.startswith("-"))
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [shutil.which(command[0]) or command[0], *command[1:]],
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )


@contextmanager
def slurm_cluster(nodes: int = NODES) -> Iterator[SlurmCluster]:
    """A SLURM of several nodes, which all commands of this process use; `EngineError` where it cannot be started."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "munge") if shutil.which(name) is None]
    if missing:
        raise EngineError(f"SLURM is not installed here (no {missing[0]})")
    if os.getuid() != 0:
        raise EngineError("SLURM's daemons are started by root alone")
    _start_munge()
    before = os.environ.get("SLURM_CONF")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        cluster = SlurmCluster(Path(name), nodes)
        try:
            cluster.wait()
            os.environ["SLURM_CONF"] = str(cluster.folder / "slurm.conf")
            yield cluster
        finally:
            os.environ.pop("SLURM_CONF", None)
            if before is not None:
                os.environ["SLURM_CONF"] = before
            cluster.close()


class RayCluster:
    """A head node, where no work is done, and nodes of one core each."""

    def __init__(self, nodes: int = NODES):
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_worker_niceness", "0")  # instead of Ray's own 15: machines may be busy
        self._cluster = Cluster()
        self._add(0)
        for _ in range(nodes):
            self._add(1)

    @property
    def address(self) -> str:
        """Where it is."""
        return str(self._cluster.address)

    def lose(self, name: str) -> None:
        """Kill the daemon of a node, and with it its workers."""
        node = next(node for node in self._cluster.worker_nodes if node.node_id == name)
        self._cluster.remove_node(node, allow_graceful=False)

    def mend(self, name: str) -> None:
        """Another node in the place of a lost one."""
        self._add(1)

    def _add(self, cores: int, times: int = 5) -> None:
        """A node; Ray gives one up that is not there within thirty seconds, which a busy machine may need."""
        for left in reversed(range(times)):
            try:
                self._cluster.add_node(num_cpus=cores, **_SMALL)
                return
            except Exception:
                if not left:
                    raise

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextmanager
def ray_cluster(nodes: int = NODES) -> Iterator[RayCluster]:
    """A Ray cluster of several nodes on this machine; `EngineError` where Ray is not installed."""
    try:
        cluster = RayCluster(nodes)
    except ImportError:
        raise EngineError("Ray is not installed here (pip install 'howsmooth[ray]')") from None
    try:
        yield cluster
    finally:
        cluster.close()


def _start_munge() -> None:
    """Munge signs what SLURM's daemons tell each other."""

    def answers() -> bool:
        return subprocess.run("munge -n | unmunge", shell=True, capture_output=True, check=False).returncode == 0

    if answers():
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged --force"], capture_output=True, check=False)
    for _ in range(20):
        if answers():
            return
        time.sleep(0.5)
    raise EngineError("munge, which SLURM needs, does not start")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(process: int, what: str) -> str:
    try:
        return Path(f"/proc/{process}/{what}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _parent(process: int) -> int:
    status = _read(process, "status")
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")), 0)
