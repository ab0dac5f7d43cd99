"""A command of the shell as tests call it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner, Result

from howsmooth.cli import app


@dataclass(frozen=True)
class Command:
    """`howsmooth NAME`, run in this process."""

    name: str

    def run(self, *args: object) -> Result:
        """Whatever comes of it."""
        return CliRunner().invoke(app, [self.name, *map(str, args)])

    def json(self, *args: object) -> Any:
        """What it prints with --json when all goes well."""
        done = self.run(*args, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def refusal(self, *args: object) -> str:
        """The one line on stderr of a command that must be refused."""
        done = self.run(*args)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        (line,) = done.stderr.splitlines()
        assert line.startswith("howsmooth: ")
        return line
