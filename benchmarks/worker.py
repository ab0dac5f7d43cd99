"""One long-sequence task in a process of its own, so that its peak memory is its own: prints one line of JSON.

python -m benchmarks.worker '{"task": "product", "n": 4096, "causal": true, "threads": 2}'
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.cases import Case, random_case
from benchmarks.timing import seconds_of

WIDTH = 64


def in_process(**task: Any) -> dict[str, Any]:
    """Run a task in a fresh interpreter and return what it found."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.worker", json.dumps(task)],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes() -> int:
    """The most memory this process has held.

    On Linux from VmHWM: there ru_maxrss also counts what the parent held when it started this process.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def product(n: int, causal: bool, rounds: int) -> dict[str, Any]:
    """Seconds and peak memory of one JᵀJ product with nothing of size n² kept, and its error."""
    case = random_case(n, WIDTH, 1, causal)
    operator = hs.jacobian(case.attention, case.x, memory=0)
    v = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(2))
    w = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3))
    found: list[Tensor] = []

    def both_ways() -> None:  # what JᵀJ costs, on vectors that let the transpose be checked
        found[:] = operator.matvec(v), operator.rmatvec(w)

    seconds = min(seconds_of(both_ways) for _ in range(rounds))
    peak = peak_bytes()
    forward, backward = found
    gap = float(((w.double() * forward).sum() - (backward.double() * v).sum()).abs() / (w.norm() * forward.norm()))
    return {"seconds": seconds, "peak": peak, "row_error": row_error(case, v, forward), "adjoint_gap": gap}


def row_error(case: Case, v: Tensor, u: Tensor, rows: int = 4) -> float:
    """The error of J v in a few tokens against torch.func in float64, which needs O(n) for one token."""
    exact = case.double()
    a, n = exact.attention, len(exact.x)
    chosen = torch.linspace(0, n - 1, rows).long()

    def tokens(x: Tensor) -> Tensor:
        query = x[chosen] @ a.query_weight[0].T * a.scale
        scores = query @ (x @ a.key_weight[0].T).T
        if case.causal:
            scores = scores.masked_fill(torch.arange(n) > chosen[:, None], float("-inf"))
        return torch.softmax(scores, dim=-1) @ (x @ a.value_weight[0].T) @ a.output_weight[0]

    expected = torch.func.jvp(tokens, (exact.x,), (v.double(),))[1]
    return float((u[chosen].double() - expected).norm() / expected.norm())


def measure(n: int, causal: bool, rounds: int) -> dict[str, Any]:
    """A full measurement to 1e-3 with the defaults of `hs.measure`."""
    case = random_case(n, WIDTH, 1, causal)
    found = hs.measure(case.attention, case.x)
    return {
        "seconds": found.seconds,
        "peak": peak_bytes(),
        "value": float(found.value),
        "lower": float(found.lower),
        "upper": float(found.upper),
        "products": found.products,
        "converged": bool(found.converged),
    }


def model(n: int, causal: bool, rounds: int) -> dict[str, Any]:
    """All of SmolLM2 at n tokens of Alice, to 1e-3; the model runs with eager attention, which is its definition."""
    from howsmooth.models import alice, open_model, target

    opened = open_model("smollm2")
    [window] = opened.windows(alice(), length=n, count=1, seed=0)
    found = hs.measure(*target(opened, "model", None, window))
    facts = {"peak": peak_bytes(), "products": found.products, "seconds": found.seconds}
    return facts | {end: float(getattr(found, end)) for end in ("value", "lower", "upper")}


def main() -> None:
    """Warm up, so that the memory of the interpreter, torch and one tile is the base, then run the task."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    warm = random_case(1024, WIDTH, 1, options["causal"])
    operator = hs.jacobian(warm.attention, warm.x, memory=0)
    operator.rmatvec(operator.matvec(warm.x))
    base = peak_bytes()
    run = {"product": product, "measure": measure, "model": model}[options["task"]]
    print(json.dumps({"base": base, **run(options["n"], options["causal"], options.get("rounds", 3))}))


if __name__ == "__main__":
    main()
