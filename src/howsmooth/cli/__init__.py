"""The command line: `howsmooth COMMAND …`.

`program` is the program itself, `lazy_commands` lists its commands without importing them and shows their help, and
every command is a module of its name. They share `options` (one definition per flag, the panels of help, `command`),
`source_options` (the map or the model and its input), `set_options` and `engine_options`; `console` prints, and
`exit_codes` turns errors and signals into one line and a code.
"""

from howsmooth.cli.program import app as app
from howsmooth.cli.program import main as main
