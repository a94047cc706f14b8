"""From option texts to settings that can be used, or one line that says why not.

Nothing is opened here but the token file; ``tap.py`` binds and starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flodl_tw.controller import AfterRun
from flodl_tw.core.addresses import DEFAULT_PORT
from flodl_tw.core.errors import SettingError
from flodl_tw.core.messages import SIGNATURE_BYTES
from flodl_tw.core.store.wire import StoreLimits
from flodl_tw.core.window import DEFAULT_CAP, StartMode, WindowSettings
from flodl_tw.core.world import LaunchSettings, RelaySettings, WorkerFields
from flodl_tw.limits import Limits, parse_scale, scaled
from flodl_tw.run import OnLoss, RunSettings
from flodl_tw.state_folder import TOKEN_VARIABLE, default_state_dir, parse_token, read_token_file, readable_token

if TYPE_CHECKING:
    from flodl_tw.fdl.cluster import ClusterFile, RosterEntry

NOT_GIVEN: Final = (
    *("cluster", "port-file", "target-ranks", "max-join-timeout", "rendezvous", "data", "control"),
    *("token-file", "dataset-sig", "model-sig", "state-dir"),
)
DEFAULTS: Final[dict[str, Any]] = {
    **dict.fromkeys(NOT_GIVEN),
    "port": "29500",
    "interface": "",
    "min-rank-start": "1",
    "join-timeout": "300",
    "start": "auto",
}
"""What an option is that neither the command nor the cluster file gives."""
FROM_COMMAND: Final[dict[str, Any]] = {
    "backend": "nccl",
    "store": "native",
    "store-max-bytes": "268435456",
    "store-max-keys": "1000000",
    "frame-ceiling": "1073741824",
    "nccl-socket-ifname": "",
    "on-loss": "abort",
    "after-run": "exit",
    "max-rejects": "1024",
    "max-pending": "4096",
    "max-pending-per-host": "1024",
    "open-admission": False,
    "allowed-host": (),
}
"""What the command itself gives for an option that nobody names: those that no cluster file has."""
Choice = TypeVar("Choice", bound=Enum)
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_HOST_NAME = re.compile(r"[0-9A-Za-z._-]+")
MAX_SECONDS: Final = 366 * 24 * 3600
MAX_COUNT: Final = 1 << 31
_SIGNATURE = re.compile(rf"[0-9a-fA-F]{{{2 * SIGNATURE_BYTES}}}")


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """All that a controller is told.

    ``token`` (16 bytes) makes admission credentialed, and ``token_source``
    says for people where it is from.  ``interface``, ``port``, ``port_file``,
    ``open_admission``, ``state_dir`` and ``warnings`` are for who opens the
    port; the server itself has no use for them.
    """

    run: RunSettings = field(default_factory=RunSettings)
    token: bytes | None = field(default=None, repr=False)
    token_source: str | None = None
    limits: Limits = field(default_factory=Limits)
    backends: Mapping[str, str] = field(default_factory=dict)
    native_rendezvous: bool = True
    after_run: AfterRun = AfterRun.HOLD
    max_pending: int = 4096
    max_pending_per_host: int = 1024
    allowed_hosts: tuple[str, ...] = ()
    interface: str = ""
    port: int = DEFAULT_PORT
    port_file: Path | None = None
    open_admission: bool = False
    state_dir: Path | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ControllerSettings:
        """What ``twistd flodl-controller`` would make of ``options``: texts or numbers, by their long names.

        An option that is not named has its default; ``environ`` is taken for
        empty.  Raises SettingError for the first that cannot be used.
        """
        given = {
            name: value if isinstance(value, bool | list | tuple) else str(value) for name, value in options.items()
        }
        return read_controller_settings({**FROM_COMMAND, **given}, environ or {})


def _number(options: Mapping[str, Any], name: str, least: int, most: int) -> int:
    text = str(options[name])
    if not _WHOLE.fullmatch(text):
        raise SettingError(f"--{name}", repr(text[:40]), "it is no whole number", f"give one from {least} to {most}")
    value = int(text)
    if not least <= value <= most:
        raise SettingError(f"--{name}", value, f"the limits are {least} and {most}", "give a number between them")
    return value


def _choice(options: Mapping[str, Any], name: str, kind: type[Choice]) -> Choice:
    text = options[name]
    try:
        return kind(text)
    except ValueError:
        words = ", ".join(str(choice.value) for choice in kind)
        raise SettingError(f"--{name}", repr(text), f"the choices are {words}", "give one of them") from None


def _signature(options: Mapping[str, Any], name: str) -> bytes | None:
    text = options[name]
    if text is None:
        return None
    if not _SIGNATURE.fullmatch(text):
        raise SettingError(
            f"--{name}", repr(text), f"a signature is {2 * SIGNATURE_BYTES} hex digits", "copy it from `fdl` whole"
        )
    return bytes.fromhex(text)


def _backend(options: Mapping[str, Any]) -> bool:
    if options["backend"] not in ("nccl", "cpu"):
        raise SettingError("--backend", repr(options["backend"]), "the choices are nccl, cpu", "give one of them")
    return bool(options["backend"] == "nccl")


def _window(options: Mapping[str, Any], scale: float) -> WindowSettings:
    join_timeout = _number(options, "join-timeout", 1, MAX_SECONDS)
    if options["max-join-timeout"] is None:
        # The default follows a window that was made longer than it.
        max_join_timeout = max(DEFAULT_CAP, join_timeout)
    else:
        max_join_timeout = _number(options, "max-join-timeout", 1, MAX_SECONDS)
    target = options["target-ranks"]
    settings = WindowSettings(
        min_rank_start=_number(options, "min-rank-start", 1, MAX_COUNT),
        target_ranks=None if target is None else _number(options, "target-ranks", 1, MAX_COUNT),
        join_timeout=join_timeout,
        max_join_timeout=max_join_timeout,
        start_mode=_choice(options, "start", StartMode),
        max_rejects=_number(options, "max-rejects", 0, MAX_COUNT),
        window_secs=scaled(join_timeout, scale),
        cap_secs=scaled(max_join_timeout, scale),
    )
    settings.check()
    return settings


def _token(
    options: Mapping[str, Any], environ: Mapping[str, str], cluster: ClusterFile | None
) -> tuple[bytes | None, str]:
    """The operator's token, from the first of its sources, and that source."""
    path = options["token-file"]
    if path is not None:
        token: bytes | None = read_token_file(path)
        source, asks = path, "--token-file"
    elif TOKEN_VARIABLE in environ:
        token = parse_token(environ[TOKEN_VARIABLE], TOKEN_VARIABLE, "(not shown)")
        source = asks = TOKEN_VARIABLE
    else:
        token, asks = (None, "") if cluster is None else (cluster.token, "the cluster file's token")
        source = options["cluster"] or ""
    if token is not None and _open_admission(options, cluster):
        raise SettingError("--open-admission", "", f"{asks} asks for credentialed admission", "drop one of the two")
    return token, source


def _backends(options: Mapping[str, Any]) -> dict[str, str]:
    """The channels that are forwarded, by name, with their endpoints."""
    named = {name: options[name] for name in ("data", "control") if options[name] is not None}
    if options["rendezvous"] not in (None, "native", "off"):
        named["rendezvous"] = options["rendezvous"]
    return named


def _native_rendezvous(options: Mapping[str, Any]) -> bool:
    chosen = options["rendezvous"]
    return bool(chosen == "native" or (chosen is None and _backend(options)))


def _store(options: Mapping[str, Any]) -> StoreLimits | None:
    """What torch's store may hold; None where it is off."""
    chosen = options["store"]
    if chosen not in ("native", "off"):
        raise SettingError("--store", repr(chosen), "the choices are native, off", "give one of them")
    most_bytes = _number(options, "store-max-bytes", 1 << 20, 1 << 40)
    most_keys = _number(options, "store-max-keys", 1, MAX_COUNT)
    return StoreLimits(total_bytes=most_bytes, total_keys=most_keys) if chosen == "native" else None


def _cluster(given: Mapping[str, Any]) -> ClusterFile | None:
    if "cluster" not in given:
        return None
    # Here, so that who has no cluster file does not wait for PyYAML at each start.
    from flodl_tw.fdl.cluster import read_cluster_file

    return read_cluster_file(given["cluster"])


def _from_file(cluster: ClusterFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the cluster file says, by the names of the options that win over it."""
    join = cluster.join
    values: dict[str, Any] = {
        "port": cluster.port,
        "min-rank-start": join.min_rank_start,
        "target-ranks": _file_target(cluster, given),
        "join-timeout": join.join_timeout,
        "max-join-timeout": join.max_join_timeout,
        "start": None if join.start is None else join.start.value,
        "interface": "127.0.0.1" if cluster.loopback else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _file_target(cluster: ClusterFile, given: Mapping[str, Any]) -> int | None:
    """The file's target under the start mode that counts: the roster's ranks where it states none, none in manual."""
    mode = given.get("start") or (cluster.join.start or StartMode.AUTO).value
    if mode == StartMode.MANUAL.value:
        return None
    if cluster.join.target_ranks is not None or cluster.join.discovery:
        return cluster.join.target_ranks
    return sum(len(entry.ranks) for entry in cluster.roster.values()) or None


def _open_admission(options: Mapping[str, Any], cluster: ClusterFile | None) -> bool:
    return bool(options["open-admission"]) or (cluster is not None and cluster.join.open_admission is True)


def _readable_token(given: Mapping[str, Any], cluster: ClusterFile | None) -> str | None:
    if cluster is None or cluster.token is None:
        return None
    return readable_token("--cluster", given["cluster"])


def _worker_fields(entry: RosterEntry, share: float | None) -> WorkerFields:
    return WorkerFields(
        nccl_socket_ifname=entry.nccl_socket_ifname,
        path=entry.path,
        arch=entry.arch,
        data_path=entry.data_path,
        gpu_ram_share=share if entry.gpu_ram_share is None else entry.gpu_ram_share,
    )


def _launch(options: Mapping[str, Any], cluster: ClusterFile | None) -> LaunchSettings:
    relay = None
    if options["control"] is not None:
        ceiling = _number(options, "frame-ceiling", 4096, 1 << 40)
        relay = RelaySettings(data_channel=options["data"] is not None, frame_ceiling=ceiling)
    share = None if cluster is None else cluster.gpu_ram_share
    roster = {} if cluster is None else {host: _worker_fields(entry, share) for host, entry in cluster.roster.items()}
    walk_in = WorkerFields(nccl_socket_ifname=options["nccl-socket-ifname"], gpu_ram_share=share)
    return LaunchSettings(roster, walk_in, relay)


def read_controller_settings(options: Mapping[str, Any], environ: Mapping[str, str]) -> ControllerSettings:
    """The settings that ``options`` (texts by long name) and the environment ask for.

    Raises SettingError for the first that cannot be used.
    """
    scale, warning = parse_scale(environ.get("FLODL_NET_TIMEOUT_SCALE"))
    given = {name: value for name, value in options.items() if value is not None}
    cluster = _cluster(given)
    options = {**DEFAULTS, **(_from_file(cluster, given) if cluster else {}), **given}
    backends = _backends(options)
    token, source = _token(options, environ, cluster)
    return ControllerSettings(
        run=RunSettings(
            window=_window(options, scale),
            nccl=_backend(options),
            dataset_sig=_signature(options, "dataset-sig"),
            model_sig=_signature(options, "model-sig"),
            on_loss=_choice(options, "on-loss", OnLoss),
            launch=_launch(options, cluster),
            one_salt=bool(backends),
            store=_store(options),
        ),
        backends=backends,
        native_rendezvous=_native_rendezvous(options),
        limits=Limits.at(scale),
        interface=options["interface"],
        port=_port(options),
        port_file=None if options["port-file"] is None else Path(options["port-file"]).absolute(),
        open_admission=_open_admission(options, cluster),
        token=token,
        token_source=source if token is not None else None,
        after_run=_choice(options, "after-run", AfterRun),
        max_pending=_number(options, "max-pending", 1, MAX_COUNT),
        max_pending_per_host=_number(options, "max-pending-per-host", 1, MAX_COUNT),
        allowed_hosts=_allowed_hosts(options),
        state_dir=Path(options["state-dir"]).absolute() if options["state-dir"] else default_state_dir(environ),
        warnings=tuple(text for text in (warning, _readable_token(given, cluster)) if text is not None),
    )


def _allowed_hosts(options: Mapping[str, Any]) -> tuple[str, ...]:
    for name in options["allowed-host"]:
        if not _HOST_NAME.fullmatch(name):
            raise SettingError(
                "--allowed-host", repr(name), "it is no host name", "give the name alone, without a port"
            )
    return tuple(options["allowed-host"])


def _port(options: Mapping[str, Any]) -> int:
    port = _number(options, "port", 0, 65535)
    if port == 0 and options["port-file"] is None:
        raise SettingError(
            "--port", 0, "the system would choose one that nobody is told", "name a --port-file, or a port"
        )
    return port
