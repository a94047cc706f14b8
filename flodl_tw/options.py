"""Options from their texts: the command line wins over the environment, and both over a file.

Each is typed, and what cannot be used is a SettingError that names what gave
the text.  A variable that is empty counts as one that is not set, whichever it
is; an empty argument is what somebody wrote, and is judged like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

from flodl_tw.core.addresses import parse_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.log_text import shown
from flodl_tw.core.messages import SIGNATURE_BYTES

ENVIRONMENT_PREFIX: Final = "FLODL_TW_"
_SIGNATURE = re.compile(rf"[0-9a-fA-F]{{{2 * SIGNATURE_BYTES}}}")
_WHOLE = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"([0-9]{1,9}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?")
_YES: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
Default = TypeVar("Default")
Choice = TypeVar("Choice")
Word = TypeVar("Word", bound=Enum)


def variable(environ: Mapping[str, str], name: str) -> str | None:
    """A variable's text; None where it is not set or empty."""
    return environ.get(name) or None


def environment_name(option: str) -> str:
    """The variable that gives an option: ``FLODL_TW_STOP_GRACE`` for ``stop-grace``."""
    return ENVIRONMENT_PREFIX + option.upper().replace("-", "_")


def by_word(kind: type[Word]) -> dict[str, Word]:
    """An enumeration as choices: its members by their values."""
    return {str(word.value): word for word in kind}


def utf8(source: str, text: str) -> str:
    """``text``, which the system gave us; SettingError where its bytes were no UTF-8, which the wire has alone."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise SettingError(source, shown(text), "it is not UTF-8", "give a text that is") from None
    return text


@dataclass(frozen=True, slots=True)
class Placed:
    """An option's text in a file, and the place for people: the file, the key and its line."""

    text: str
    place: str


class OptionReader:
    """Reads options by their long names; made once for a command.

    ``options`` has what the command line gave: texts, or numbers and truths of
    an embedding program; None is not given.  ``variables`` says whether the
    environment may give options, too.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        environ: Mapping[str, str],
        file: Mapping[str, Placed] | None = None,
        *,
        variables: bool = True,
    ) -> None:
        self._options = options
        self.environ = environ
        self._file = file or {}
        self._variables = variables

    def with_file(self, file: Mapping[str, Placed]) -> OptionReader:
        """The same command, with what a file gives where nothing else does."""
        return OptionReader(self._options, self.environ, file, variables=self._variables)

    def variable(self, name: str) -> str | None:
        """A variable that gives no option; None where it is not set or empty."""
        return variable(self.environ, name)

    def _find(self, name: str) -> Placed | None:
        value = self._options.get(name)
        if value is not None:
            return Placed(str(value), f"--{name}")
        text = self.variable(environment_name(name)) if self._variables else None
        return self._file.get(name) if text is None else Placed(text, environment_name(name))

    def get(self, name: str) -> str | None:
        """The option's text, or None where nobody gave it."""
        found = self._find(name)
        return None if found is None else found.text

    def source(self, name: str) -> str:
        """What gave the option: itself, its variable, or the place in a file."""
        found = self._find(name)
        return f"--{name}" if found is None else found.place

    def by_file(self, name: str) -> bool:
        """Whether the file gives the option, since neither command line nor environment does."""
        found = self._find(name)
        return found is not None and found is self._file.get(name)

    def endpoint(self, name: str) -> tuple[str, int] | None:
        """Host and port of an argument ``HOST[:PORT]``, which no variable and no file gives."""
        value = self._options.get(name)
        try:
            return None if value is None else parse_endpoint(str(value))
        except ValueError as error:
            raise SettingError("HOST[:PORT]", shown(str(value)), str(error), "name the controller") from None

    def wrong(self, name: str, limit: str, way_out: str) -> SettingError:
        """The error for the option's value."""
        return SettingError(self.source(name), shown(self.get(name) or ""), limit, way_out)

    def text(self, name: str) -> str | None:
        """A text that goes over the wire."""
        text = self.get(name)
        return None if text is None else utf8(self.source(name), text)

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts of an option that may be given again; no variable and no file gives one."""
        value = self._options.get(name)
        if value is None or isinstance(value, str):
            return () if value is None else (value,)
        return tuple(map(str, value)) if isinstance(value, Iterable) else (str(value),)

    def flag(self, name: str) -> bool:
        """Whether an option without a value is on."""
        text = (self.get(name) or "").lower()
        if text not in _YES:
            raise self.wrong(name, "the choices are 1 and 0", "give one of them")
        return _YES[text]

    def whole(self, name: str, least: int, most: int, default: Default) -> int | Default:
        """A whole number."""
        text = self.get(name)
        if text is None:
            return default
        if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            raise self.wrong(name, f"the limits are {least} and {most}", "give a whole number between them")
        return int(text)

    def decimal(self, name: str, most: float, default: Default) -> float | Default:
        """A number of at least 0, such as a count of seconds."""
        text = self.get(name)
        if text is None:
            return default
        if not _DECIMAL.fullmatch(text) or not 0 <= float(text) <= most:
            raise self.wrong(name, f"the limits are 0 and {most:g}", "give a number between them")
        return float(text)

    def choice(self, name: str, choices: Mapping[str, Choice], default: Choice) -> Choice:
        """One of a few words, as what it stands for."""
        text = self.get(name)
        if text is None:
            return default
        if text not in choices:
            raise self.wrong(name, f"the choices are {', '.join(choices)}", "give one of them")
        return choices[text]

    def signature(self, name: str) -> bytes | None:
        """32 bytes, given as hex."""
        text = self.get(name)
        if text is None:
            return None
        if not _SIGNATURE.fullmatch(text):
            raise self.wrong(name, f"a signature is {2 * SIGNATURE_BYTES} hex digits", "copy it whole")
        return bytes.fromhex(text)
