"""The command line: `howsmooth COMMAND …`.

`program` lists the commands without importing them and shows their help; every command is a module of its name. They
share `options` (one definition per flag, the panels of help, engines, `command`) and `source_options` (the map or the
model and its input, sets of inputs); `terminal` prints, and turns errors and signals into one line and an exit code.
"""

from howsmooth.cli.program import app as app
from howsmooth.cli.program import main as main
