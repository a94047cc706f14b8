"""What an agent is told: from options, environment and a launcher's bootstrap to settings that can be used.

Every option may come by environment, too: ``--stop-grace`` as
``FLODL_TW_STOP_GRACE``; the command line wins, and over both a file's
(``fdl_yml.py``).  Nothing is dialed here.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flodl_tw.agent.devices import Device
from flodl_tw.core.addresses import parse_endpoint, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.messages import SIGNATURE_BYTES, Hello
from flodl_tw.limits import SCALE_VARIABLE, parse_scale
from flodl_tw.state_folder import TOKEN_VARIABLE, parse_token, read_token_file

if TYPE_CHECKING:
    from flodl_tw.fdl.join_block import JoinFile

BOOTSTRAP_VARIABLE: Final = "FLODL_INTERNAL_AGENT_JSON"
HOST_VARIABLE: Final = "FLODL_HOST_NAME"
ENVIRONMENT_PREFIX: Final = "FLODL_TW_"
MAX_GRACE: Final = 24 * 3600
MAX_SHOWN: Final = 100
"""Characters of a value that an error repeats."""
_SIGNATURE = re.compile(rf"[0-9a-fA-F]{{{2 * SIGNATURE_BYTES}}}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"([0-9]{1,9}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?")
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_YES: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """All that an agent is told.  ``token`` is 16 bytes; ``stop_grace`` is in seconds, and is never scaled."""

    controller: tuple[str, int]
    """Host and port to dial, as given: what this host's ranks are told, too."""
    host: str
    program: tuple[str, ...]
    """The ranks' program, found, and its arguments."""
    token: bytes | None = field(default=None, repr=False)
    libtorch: str | None = None
    nccl_version: tuple[int, int, int] | None = None
    dataset_sig: bytes = bytes(SIGNATURE_BYTES)
    run_id: str | None = None
    model_sig: bytes | None = None
    data_path: str | None = None
    gpu_ram_share: float | None = None
    persist: bool = False
    stop_grace: float = 30.0
    log_dir: Path | None = None
    scale: float = 1.0

    @property
    def endpoint(self) -> str:
        """The controller, for people."""
        return show_endpoint(*self.controller)

    def hello(self, devices: tuple[Device, ...], libtorch: str) -> Hello:
        """What this host says of itself.  ``libtorch`` is what its devices suggest, where no option says more."""
        return Hello(
            host=self.host,
            local_devices=bytes(device.number for device in devices),
            gpus=tuple(device.label for device in devices if device.label),
            libtorch=self.libtorch or libtorch,
            dataset_sig=self.dataset_sig,
            run_id=self.run_id,
            nccl_version=self.nccl_version,
            model_sig=self.model_sig,
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """An option's text in a file, and the place for people: the file, the key and its line."""

    text: str
    place: str


class Texts:
    """Option texts by name, from the command line, or else the environment, or else a file.

    ``source`` names where a value came from, for errors.
    """

    def __init__(
        self, options: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Placed] | None = None
    ) -> None:
        self._options = options
        self._environ = environ
        self._file = file or {}

    def get(self, name: str) -> str | None:
        """The option's text, or None where nobody gave it; a variable that is empty gives nothing."""
        given = self._options.get(name)
        if given is None:
            given = self._environ.get(environment_name(name)) or None
        if given is None and name in self._file:
            given = self._file[name].text
        return given

    def source(self, name: str) -> str:
        """The option, or the variable or the place in a file that gave it."""
        if self._options.get(name) is not None:
            return f"--{name}"
        in_file = self.by_file(name)
        return environment_name(name) if in_file is None else in_file.place

    def by_file(self, name: str) -> Placed | None:
        """What the file gives, where neither command line nor environment does."""
        given = self._options.get(name) is not None or self._environ.get(environment_name(name))
        return None if given else self._file.get(name)

    def wrong(self, name: str, limit: str, way_out: str) -> SettingError:
        """The error for the option's value."""
        return SettingError(self.source(name), shown(self.get(name) or ""), limit, way_out)

    def text(self, name: str) -> str | None:
        """A text that goes over the wire."""
        text = self.get(name)
        return None if text is None else _utf8(self.source(name), text)

    def flag(self, name: str) -> bool:
        """Whether an option without a value is on."""
        if self._options.get(name):
            return True
        text = (self.get(name) or "").lower()
        if text not in _YES:
            raise SettingError(self.source(name), repr(text), "the choices are 1 and 0", "give one of them")
        return _YES[text]

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number."""
        text = self.get(name)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
            raise self.wrong(name, f"the limits are {least} and {most}", "give a whole number between them")
        return int(text)

    def decimal(self, name: str, most: float) -> float | None:
        """A number of at least 0."""
        text = self.get(name)
        if text is None:
            return None
        if not _DECIMAL.fullmatch(text) or not 0 <= float(text) <= most:
            raise self.wrong(name, f"the limits are 0 and {most:g}", "give a number between them")
        return float(text)

    def signature(self, name: str) -> bytes | None:
        """32 bytes, given as hex."""
        text = self.get(name)
        if text is None:
            return None
        if not _SIGNATURE.fullmatch(text):
            raise self.wrong(name, f"a signature is {2 * SIGNATURE_BYTES} hex digits", "copy it whole")
        return bytes.fromhex(text)


def shown(text: str) -> str:
    """A value for people, in quotes; a long one is cut."""
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…")


def _utf8(source: str, text: str) -> str:
    """``text``, which the system gave us; SettingError where its bytes were no UTF-8, which the wire has alone."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise SettingError(source, shown(text), "it is not UTF-8", "give a text that is") from None
    return text


def environment_name(option: str) -> str:
    """The variable that gives an option: ``FLODL_TW_STOP_GRACE`` for ``stop-grace``."""
    return ENVIRONMENT_PREFIX + option.upper().replace("-", "_")


def find_program(words: list[str]) -> tuple[str, ...]:
    """The program and its arguments, with the program found; SettingError where it is not there or does not run."""
    if not words:
        raise SettingError("PROGRAM", "", "there is none", "give it after --, with its arguments")
    found = shutil.which(words[0])
    if found is None:
        raise SettingError("PROGRAM", shown(words[0]), _why_not(words[0]), "give the path of an executable file")
    return (os.path.abspath(found), *words[1:])


def _why_not(program: str) -> str:
    if not os.path.dirname(program):
        here = ", though in this folder: write ./ before it, or python before a script"
        return "it is not on PATH" + (here if os.path.exists(program) else "")
    return "it cannot be executed" if os.path.exists(program) else "there is no such file"


def given_token(texts: Texts, environ: Mapping[str, str]) -> bytes | None:
    """The token, from the first of its sources; never from an argument."""
    path = texts.get("token-file")
    if path is not None:
        return read_token_file(path, texts.source("token-file"))
    if TOKEN_VARIABLE in environ:
        return parse_token(environ[TOKEN_VARIABLE], TOKEN_VARIABLE, "(not shown)")
    return None


def _controller(options: Mapping[str, Any], file: JoinFile | None) -> tuple[str, int]:
    given = options.get("controller")
    if given is None:
        controller = file.controller() if file else None
        if controller is None:
            way_out = "name the controller, or a file whose join: block does with --fdl-yml"
            raise SettingError("HOST[:PORT]", "", "there is none", way_out)
        return controller
    try:
        return parse_endpoint(given)
    except ValueError as error:
        raise SettingError("HOST[:PORT]", shown(given), str(error), "name the controller") from None


def _nccl_version(texts: Texts) -> tuple[int, int, int] | None:
    text = texts.get("nccl-version")
    if text is None:
        return None
    found = _VERSION.fullmatch(text)
    parts = tuple(int(part or 0) for part in found.groups()) if found else ()
    if len(parts) != 3 or max(parts) >= 1 << 32:
        raise texts.wrong("nccl-version", "a version is MAJOR.MINOR or MAJOR.MINOR.PATCH", "give one such as 2.23.4")
    return parts[0], parts[1], parts[2]


def _log_dir(texts: Texts) -> Path | None:
    text = texts.get("log-dir")
    if text is None:
        return None
    if not text:
        raise texts.wrong("log-dir", "it names no folder", "name a folder of your own")
    try:
        path = Path(text).absolute()
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise texts.wrong("log-dir", f"it cannot be made ({error.strerror})", "name a folder of your own") from None
    if not usable:
        raise texts.wrong("log-dir", "it cannot be written to", "name a folder of your own")
    return path


def _host(texts: Texts, environ: Mapping[str, str]) -> str:
    """This host's name, from the first of its sources that has one."""
    given = texts.text("host")
    if given:
        return given
    name = environ.get(HOST_VARIABLE)
    return _utf8(HOST_VARIABLE, name) if name else _utf8("this machine's host name", socket.gethostname())


def _share(texts: Texts) -> float | None:
    share = texts.decimal("gpu-ram-share", 1024)
    if share is not None and share <= 0:
        raise texts.wrong("gpu-ram-share", "it must be above 0", "give a fraction such as 0.5")
    return share


def read_agent_settings(
    options: Mapping[str, Any],
    program: list[str],
    environ: Mapping[str, str],
    *,
    nccl: tuple[int, int, int] | None = None,
    token: bytes | None = None,
    file: JoinFile | None = None,
) -> tuple[AgentSettings, list[str]]:
    """The settings of an agent, and warnings.

    ``options`` holds texts by long name, None for what was not given;
    ``nccl`` is what the host's own files tell, ``token`` what a launcher has
    given, and ``file`` what is to be taken where nothing else says more.
    Raises SettingError for the first that cannot be used.
    """
    texts = Texts(options, environ, file.texts if file else None)
    scale, warning = parse_scale(environ.get(SCALE_VARIABLE))
    controller = _controller(options, file)
    grace = texts.decimal("stop-grace", MAX_GRACE)
    settings = AgentSettings(
        controller=controller,
        host=_host(texts, environ),
        program=find_program(program),
        token=token or given_token(texts, environ) or (file.token() if file else None),
        libtorch=texts.text("libtorch"),
        nccl_version=_nccl_version(texts) or nccl,
        dataset_sig=texts.signature("dataset-sig") or bytes(SIGNATURE_BYTES),
        run_id=texts.text("run-id"),
        model_sig=texts.signature("model-sig"),
        data_path=texts.text("data-path"),
        gpu_ram_share=_share(texts),
        persist=texts.flag("persist"),
        stop_grace=30.0 if grace is None else grace,
        log_dir=_log_dir(texts),
        scale=scale,
    )
    return settings, [] if warning is None else [warning]
