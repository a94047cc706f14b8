"""What an agent is told: from options, environment and a launcher's bootstrap to settings that can be used.

Nothing is dialed here.
"""

from __future__ import annotations

import mmap
import os
import re
import shlex
import shutil
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl_tw.agent.devices import Device
from flodl_tw.agent.gpu_view import GpuView
from flodl_tw.core.addresses import show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.log_text import shown
from flodl_tw.core.messages import SIGNATURE_BYTES, Hello
from flodl_tw.limits import SCALE_VARIABLE, parse_scale
from flodl_tw.options import OptionReader, utf8
from flodl_tw.state_folder import given_token

if TYPE_CHECKING:
    from flodl_tw.fdl.join_block import JoinFile

BOOTSTRAP_VARIABLE: Final = "FLODL_INTERNAL_AGENT_JSON"
HOST_VARIABLE: Final = "FLODL_HOST_NAME"
FLODLS_VARIABLES: Final = b"FLODL_INTERNAL_"
"""What stands in every native program of flodl's: the names of the variables that tell its part in a world."""
DEFAULT_GRACE: Final = 30.0
MAX_GRACE: Final = 24 * 3600
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")


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
    stop_grace: float = DEFAULT_GRACE
    log_dir: Path | None = None
    scale: float = 1.0
    gpu_view: GpuView = GpuView.ALL
    own_store: bool = False
    """Whether torch's store is rank 0's own, on its host, and not the controller's."""
    terminal: bool = False
    """Whether the world's rank 0 gets our standard input."""

    @property
    def endpoint(self) -> str:
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


def find_program(words: list[str]) -> tuple[str, ...]:
    """The program and its arguments, with the program found; SettingError where it is not there or does not run."""
    if not words:
        raise SettingError("PROGRAM", "", "there is none", "give it after --, with its arguments")
    found = shutil.which(words[0])
    if found is None:
        way_out = "give the path of an executable file"
        if os.path.dirname(words[0]) and words[0].endswith(".py") and os.path.isfile(words[0]):
            way_out += f", or start the script by Python: -- python {shlex.quote(words[0])}"
        raise SettingError("PROGRAM", shown(words[0]), _why_not(words[0]), way_out)
    return (os.path.abspath(found), *words[1:])


def _why_not(program: str) -> str:
    if not os.path.dirname(program):
        here = ", though in this folder: write ./ before it, or python before a script"
        return "it is not on PATH" + (here if os.path.exists(program) else "")
    return "it cannot be executed" if os.path.exists(program) else "there is no such file"


def knows_flodl(program: str) -> bool:
    """Whether a program is a native one of flodl's."""
    try:
        with open(program, "rb") as file:
            if file.read(4) != b"\x7fELF":
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(FLODLS_VARIABLES) >= 0
    except (OSError, ValueError):
        # One that may be started, and not read.
        return False


def _controller(given: OptionReader, file: JoinFile | None) -> tuple[str, int]:
    controller = given.endpoint("controller") or (file.controller() if file else None)
    if controller is None:
        way_out = "name the controller, or a file whose join: block does with --fdl-yml"
        raise SettingError("HOST[:PORT]", "", "there is none", way_out)
    return controller


def _nccl_version(given: OptionReader) -> tuple[int, int, int] | None:
    text = given.get("nccl-version")
    if text is None:
        return None
    found = _VERSION.fullmatch(text)
    parts = tuple(int(part or 0) for part in found.groups()) if found else ()
    if len(parts) != 3 or max(parts) >= 1 << 32:
        raise given.wrong("nccl-version", "a version is MAJOR.MINOR or MAJOR.MINOR.PATCH", "give one such as 2.23.4")
    return parts[0], parts[1], parts[2]


def _log_dir(given: OptionReader) -> Path | None:
    text = given.get("log-dir")
    if text is None:
        return None
    if not text:
        raise given.wrong("log-dir", "it names no folder", "name a folder of your own")
    try:
        path = Path(text).absolute()
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise given.wrong("log-dir", f"it cannot be made ({error.strerror})", "name a folder of your own") from None
    if not usable:
        raise given.wrong("log-dir", "it cannot be written to", "name a folder of your own")
    return path


def _host(given: OptionReader) -> str:
    """This host's name, from the first of its sources that has one."""
    name = given.text("host")
    if name:
        return name
    name = given.variable(HOST_VARIABLE)
    return utf8(HOST_VARIABLE, name) if name else utf8("this machine's host name", socket.gethostname())


def _share(given: OptionReader) -> float | None:
    share = given.decimal("gpu-ram-share", 1024, None)
    if share is not None and share <= 0:
        raise given.wrong("gpu-ram-share", "it must be above 0", "give a fraction such as 0.5")
    return share


def read_agent_settings(
    given: OptionReader,
    program: list[str],
    *,
    nccl: tuple[int, int, int] | None = None,
    token: bytes | None = None,
    file: JoinFile | None = None,
    flodl: bool = False,
) -> tuple[AgentSettings, list[str]]:
    """The settings of an agent, and warnings.

    ``nccl`` is what the host's own files tell, ``token`` what a launcher has
    given, and ``file`` what is to be taken where nothing else says more.
    ``flodl`` says that the program is known to be one of flodl's.
    Raises SettingError for the first that cannot be used.
    """
    if file is not None:
        given = given.with_file(file.texts)
    scale, warning = parse_scale(given.variable(SCALE_VARIABLE))
    warnings = [] if warning is None else [warning]
    settings = AgentSettings(
        controller=_controller(given, file),
        host=_host(given),
        program=find_program(program),
        token=token or given_token(given, warnings.append)[0] or (file.token() if file else None),
        libtorch=given.text("libtorch"),
        nccl_version=_nccl_version(given) or nccl,
        dataset_sig=given.signature("dataset-sig") or bytes(SIGNATURE_BYTES),
        run_id=given.text("run-id"),
        model_sig=given.signature("model-sig"),
        data_path=given.text("data-path"),
        gpu_ram_share=_share(given),
        persist=given.flag("persist"),
        stop_grace=given.decimal("stop-grace", MAX_GRACE, DEFAULT_GRACE),
        log_dir=_log_dir(given),
        scale=scale,
        own_store=given.choice("master-addr", {"controller": False, "rank0": True}, False),
    )
    if given.flag("virtual-local-rank"):
        settings = replace(settings, gpu_view=GpuView.VIRTUAL)
    elif flodl or file is not None:
        settings = replace(settings, gpu_view=GpuView.OWN)
    elif knows_flodl(settings.program[0]):
        settings = replace(settings, gpu_view=GpuView.OWN)
        warnings.append(f"{shown(settings.program[0])} is a program of flodl's, so each rank sees its own GPU alone")
    return settings, warnings
