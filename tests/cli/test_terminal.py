"""No text from a file can command the terminal, whatever it is part of."""

from __future__ import annotations

import io
import json
import os
import pty
import unicodedata
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from evidence.scan_faults import TEXT, make_model
from howsmooth.cli import app
from howsmooth.cli.terminal import SafeConsole, complain, terminal_json
from howsmooth.scans import scan
from tests.cli.command import Command

CLIPBOARD = "\x1b]52;c;cHduZWQ=\x1b\\"
HOSTILE = f"a{CLIPBOARD}\x1b[2J\x9b31m\u202eb\x07[bold]<b>".replace("/", "")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose model and text have names that no terminal should obey."""
    path = tmp_path_factory.mktemp("foreign") / "foreign.sqlite"
    model, text = path.with_name(HOSTILE), path.with_name(f"{HOSTILE}.txt")
    model.mkdir()
    make_model(model)
    (model / TEXT).rename(text)
    scan(str(model), text, lengths=[8, 16], out=path)
    return path


def commands_in(said: str) -> set[str]:
    """Controls in a text, beside line breaks."""
    return {letter for letter in said if unicodedata.category(letter) in ("Cc", "Cf") and letter not in "\r\n"}


def on_a_terminal(*args: object) -> tuple[int, str]:
    """The command in a fork of this process, on a terminal of its own: its exit code and all that it showed."""
    child, terminal = pty.fork()
    if child == 0:
        code = 99
        try:
            os.environ["TERM"] = "xterm-256color"
            for name, number in (("stdout", 1), ("stderr", 2)):
                setattr(__import__("sys"), name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
            app([str(arg) for arg in args], prog_name="howsmooth")
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        shown += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode(errors="surrogateescape")


@pytest.mark.parametrize("options", [(), ("--summary",), ("--json",)])
def test_a_terminal_shows_the_names_of_a_foreign_store_and_obeys_none(
    foreign: Path, options: tuple[str, ...], tmp_path: Path
) -> None:
    code, shown = on_a_terminal("report", foreign, "-o", tmp_path / "r.html", *options)
    assert code == 0, shown
    assert "cHduZWQ" in shown  # the name is there
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert not {"\x9b", "\u202e", "\x07"} & set(shown)


def test_errors_on_a_terminal_obey_no_name(tmp_path: Path) -> None:
    code, shown = on_a_terminal("report", tmp_path / f"{HOSTILE}.sqlite")
    assert code == 2
    assert "cHduZWQ" in shown
    (line,) = [line for line in shown.splitlines() if "cHduZWQ" in line]
    assert not commands_in(line[line.index("howsmooth: ") :])


def test_piped_output_holds_no_controls(foreign: Path, tmp_path: Path) -> None:
    for options in ((), ("--summary",), ("--json",)):
        done = Command("report").run(foreign, "-o", tmp_path / "r.html", *options)
        assert done.exit_code == 0, done.output
        assert not commands_in(done.stdout + done.stderr)


def test_json_says_the_name_in_full(foreign: Path, tmp_path: Path) -> None:
    (group,) = json.loads(Command("report").run(foreign, "-o", tmp_path / "r.html", "--json").stdout)["groups"]
    assert HOSTILE in group["text"]


def test_a_console_passes_styles_and_no_controls_of_text() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=100)
    table = Table("name")
    table.add_row(Text(HOSTILE))
    console.print(Text(f"{HOSTILE}\nsecond", style="bold"), table, HOSTILE.replace("[bold]", ""))
    said = out.getvalue()
    assert "\x1b[1m" in said  # bold is rich's own word
    assert "second" in said
    assert "\x1b]" not in said
    assert "\x1b[2J" not in said
    assert not {"\x9b", "\u202e", "\x07"} & set(said)


def test_json_for_a_terminal_is_the_same_json() -> None:
    content = {"a": HOSTILE, "b": ["é ½ 語", "tab\t line\n"], "\u2028": 1}
    said = terminal_json(json.dumps(content, indent=2, ensure_ascii=False))
    assert json.loads(said) == content
    assert not commands_in(said)
    assert "語" in said


def test_complaints_are_one_line_without_controls(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"cannot read\n{HOSTILE}\udcff")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not commands_in(said)
