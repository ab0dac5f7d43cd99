"""Calls of tokenizers, which are written in Rust and may panic.

A panic (a regular expression that backtracks for ever, say) reaches Python as a `BaseException` that no
``except Exception`` sees, and Rust has by then printed a report of many lines on the standard error of the process.
Here both become one sentence.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TypeVar

from howsmooth._util.common import first_line, out_of_memory
from howsmooth._util.process_lock import alone
from howsmooth.errors import HowsmoothError, InvalidInput

Result = TypeVar("Result")
_STDERR = 2
_OURS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)
"""All that Python itself raises."""


class Panic(InvalidInput):
    """A library written in Rust gave up in the middle of its work."""


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The ids of a text; `InvalidInput` where the tokenizer cannot read it."""
    return _read(lambda: list(tokenizer(text, **options)["input_ids"]))


def token_names(tokenizer: Any, ids: list[int]) -> list[str]:
    """The tokens of ids as the tokenizer writes them."""
    return _read(lambda: [str(token) for token in tokenizer.convert_ids_to_tokens(ids)])


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of every id by itself."""
    return _read(lambda: [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids])


@alone
def without_panic(call: Callable[[], Result]) -> Result:
    """The value of a call; a panic in it is a `Panic`, and its report is not printed."""
    with _kept_back() as report:
        try:
            return call()
        except _OURS:
            raise
        except BaseException as panic:
            report.truncate(0)
            raise Panic(f"the tokenizer gave up ({first_line(panic)}): take another text or tokenizer.") from panic


def _read(call: Callable[[], Result]) -> Result:
    try:
        return without_panic(call)
    except HowsmoothError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        said = first_line(error, kind=True)
        raise InvalidInput(f"the tokenizer cannot read this text ({said}): take another text or tokenizer.") from error


@contextmanager
def _kept_back() -> Iterator[IO[bytes]]:
    """A file that takes what is written on standard error meanwhile, by any language; its content is printed after."""
    with tempfile.TemporaryFile(buffering=0) as report:
        try:
            usual = os.dup(_STDERR)
        except OSError:  # a process without standard error
            yield report
            return
        os.dup2(report.fileno(), _STDERR)
        try:
            yield report
        finally:
            os.dup2(usual, _STDERR)
            os.close(usual)
            report.seek(0)
            while said := report.read(2**16):
                os.write(_STDERR, said)
