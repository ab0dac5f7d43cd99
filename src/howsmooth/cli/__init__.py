"""The command line: `howsmooth COMMAND …`.

`program` is the program itself, `lazy_commands` finds its commands without importing them, and every command is a
module of its name. They share `source_options` (the map or the model and its input), `set_options`, `engine_options`,
`options` and `figure_output`; `console` prints, and `exit_codes` turns errors and signals into one line and a code.
"""

from howsmooth.cli.program import app, main

__all__ = ["app", "main"]
