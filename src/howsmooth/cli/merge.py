"""`howsmooth merge`: stores of several scans, or of the shards of one, as one store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from howsmooth.cli.options import AsJson, command, out_option, output_option
from howsmooth.cli.terminal import print_json, print_line


@command
def merge(
    stores: Annotated[list[Path], Argument(help="The stores to join; they stay as they are.")],
    out: Annotated[Path, out_option("The store to write, which must not be there.")],
    partial: Annotated[bool, output_option("Also if shards are missing or unfinished.", "--partial")] = False,
    as_json: AsJson = False,
) -> None:
    """Join stores that `howsmooth scan` wrote into a new one.

    A cell of several stores must have the same numbers everywhere, and scans of one model on one text the same
    settings and version. Of a scan in shards every shard must be there, once and to its end.

    Examples:
      howsmooth merge part-1.sqlite part-2.sqlite --out all.sqlite
      howsmooth merge shards/*.sqlite --out all.sqlite --json
    """
    from howsmooth.scans import merge as join

    done = join(stores, out, partial=partial)
    if as_json:
        print_json(vars(done))
    else:
        print_line(f"{done}.")
