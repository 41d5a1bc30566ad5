"""What options take. A value that cannot be used is told in one line: the option, the value, what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer

from stepfence.errors import BadInput
from stepfence.model import LONGEST_S
from stepfence.settings import MOST_ATTEMPTS

T = TypeVar("T")


class BadValue(typer.BadParameter):
    """A value that cannot be used."""

    def format_message(self) -> str:
        """Name the option or argument, then say what is wrong."""
        parameter: Any = self.param
        name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.metavar
        return f"{name} {self.message}"


def _parser(read: Callable[[Any], T], is_usable: Callable[[T], bool], wanted: str) -> Callable[[Any], T]:
    def parse(given: Any) -> T:
        try:
            value = read(given)
            if is_usable(value):
                return value
        except ValueError:
            pass
        shown = given if str(given).isprintable() and str(given).split() == [given] else repr(given)
        raise BadValue(f"{shown}: {wanted}") from None

    return parse


def path(given: Any) -> Path:
    """Read a path; an empty one would be the current directory."""
    return Path(text(given))


def here() -> Path:
    """Return the current directory.

    Raises:
        BadInput: it was removed.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise BadInput(
            f"the current directory cannot be told ({error.strerror}), perhaps it was removed: cd to one that is there"
        ) from error


def choice(*words: str) -> Callable[[Any], str]:
    """Return the parser for one of a few words."""
    return _parser(str, lambda word: word in words, f"choose {', '.join(words[:-1])} or {words[-1]}")


text = _parser(str, bool, "it is empty: give a value, or leave it out")
seconds = _parser(float, lambda value: 0 < value < LONGEST_S, "give seconds above 0, e.g. 300")
wait = _parser(float, lambda value: 0 <= value < LONGEST_S, "give seconds, 0 or more, e.g. 2.5")
attempts = _parser(
    int,
    lambda value: 1 <= value <= MOST_ATTEMPTS,
    f"give the number of attempts in all, 1 (no retry) to {MOST_ATTEMPTS}",
)
positive = _parser(int, lambda value: value >= 1, "give a whole number, 1 or more")
natural = _parser(int, lambda value: value >= 0, "give a whole number, 0 or more")
mebibytes = _parser(int, lambda value: value >= 0, "give MiB as a whole number, e.g. 4096 for 4 GiB")

LAUNCHERS = "srun|local|auto"
LAUNCHER = choice(*LAUNCHERS.split("|"))
