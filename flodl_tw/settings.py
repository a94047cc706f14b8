"""What a controller is told: from options by name to settings that can be used, or one line that says why not.

Nothing is opened here but the token file and the cluster file.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl_tw.core.addresses import DEFAULT_PORT, classify, parse_backend, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.run_settings import AfterRun, OnLoss, RunSettings
from flodl_tw.core.store.wire import StoreLimits
from flodl_tw.core.tokens import TOKEN_VARIABLE, shown_path
from flodl_tw.core.window import StartMode, WindowSettings
from flodl_tw.core.world import LaunchSettings, RelaySettings, WorkerFields
from flodl_tw.limits import SCALE_VARIABLE, Limits, parse_scale, scaled
from flodl_tw.options import OptionReader, by_word
from flodl_tw.state_folder import Tell, given_token, readable_token

if TYPE_CHECKING:
    from flodl_tw.fdl.cluster import ClusterFile

OPTIONS: Final = [
    ["cluster", None, None, "A cluster.yml of flodl, or an fdl.yml with its cluster block; options win over it."],
    ["port", "p", None, "Port to listen on [default: 29500]; 0 lets the system choose (with --port-file)."],
    ["port-file", None, None, "File that gets the port once it is listened on."],
    ["interface", None, None, "Address to listen on [default: all, IPv4 and IPv6]."],
    ["min-rank-start", None, None, "Quorum: ranks without which no world forms [default: 1]."],
    ["target-ranks", None, None, "Ranks at which the window closes at once."],
    ["join-timeout", None, None, "Seconds after which a quorum is enough, except with manual [default: 300]."],
    ["max-join-timeout", None, None, "Seconds after which a run without a world fails [default: 600 or more]."],
    ["start", None, None, "Who closes the window: auto (the clock, the default), manual (the operator) or hybrid."],
    ["backend", None, "nccl", "Data plane: nccl (one GPU vendor, one NCCL minor version) or cpu."],
    ["rendezvous", None, None, "Rendezvous channel: native, off, or an endpoint [default: native, off with cpu]."],
    ["data", None, None, "Endpoint that the data channel is forwarded to, such as tcp:HOST:PORT or unix:PATH."],
    ["control", None, None, "Endpoint that the control channel is forwarded to: where a coordinator listens."],
    ["store", None, "native", "torch.distributed's store on the same port, for the world's hosts: native or off."],
    ["store-max-bytes", None, "268435456", "Bytes that a world's store may hold."],
    ["store-max-keys", None, "1000000", "Keys that a world's store may hold."],
    ["frame-ceiling", None, "1073741824", "Bytes of the largest frame that relays pass on (with --control)."],
    ["nccl-socket-ifname", None, "", "Network interface for the ranks of hosts that no cluster file names."],
    ["token-file", None, None, "File with the token, 32 hex digits, its owner's [default: $FLODL_JOIN_TOKEN]."],
    ["dataset-sig", None, None, "Dataset signature that hosts must have, 64 hex digits."],
    ["model-sig", None, None, "Model signature that hosts must have, 64 hex digits."],
    ["on-loss", None, "abort", "What a lost host or failed rank does to the others: abort or continue."],
    ["after-run", None, "exit", "What follows a run: exit (status 0 or 1), hold (serve its state) or rearm."],
    ["max-rejects", None, "1024", "Refused hosts that a window bears; 0 sets no limit."],
    ["max-pending", None, "4096", "Connections that may not yet have said what they want."],
    ["max-pending-per-host", None, "1024", "The same from one address; loopback is exempt."],
    ["state-dir", None, None, "Folder of a token that is made [default: $STATE_DIRECTORY or $XDG_STATE_HOME]."],
]
"""The options with a value, as Twisted has them: the long name, the short one, the default, the help."""
NAMES: Final = frozenset({row[0] for row in OPTIONS} | {"open-admission", "allowed-host"})
MAX_SECONDS: Final = 366 * 24 * 3600
MAX_COUNT: Final = 1 << 31
_HOST_NAME = re.compile(r"[0-9A-Za-z._-]+")


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """All that a controller is told.

    ``token`` (16 bytes) makes admission credentialed, and ``token_source``
    says for people where it is from.  ``advertised`` is the name or address
    that workers dial, where somebody has said it.  ``interface``, ``port``, ``port_file``,
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
    advertised: str | None = None

    def join_endpoint(self, host: str, port: int) -> str:
        """Where workers dial the controller that listens on ``host``, for people: log and page say the same."""
        every = host in ("::", "0.0.0.0")  # noqa: S104
        bound = socket.gethostname() if every else classify(host).shown
        return show_endpoint(self.advertised or bound, port)

    @classmethod
    def from_options(
        cls, options: Mapping[str, object], environ: Mapping[str, str] | None = None
    ) -> ControllerSettings:
        """What ``twistd flodl-controller`` makes of ``options``: texts or numbers, by their long names.

        An option that is None or not named has its default; ``environ`` is
        taken for empty.  Raises SettingError for the first that cannot be used.
        """
        for name in options:
            if name not in NAMES:
                way_out = "twistd flodl-controller --help lists them, and a name is written with dashes here, too"
                raise SettingError(f"--{name}", "", "there is no such option", way_out)
        given = OptionReader(options, environ or {}, variables=False)
        path = given.get("cluster")
        if path is None:
            return _settings(given, None)
        # Here, so that who has no cluster file does not wait for PyYAML at each start.
        from flodl_tw.fdl.cluster import read_cluster_file

        cluster = read_cluster_file(path, given.get("start"))
        return _settings(given.with_file(cluster.options), cluster)


def _settings(given: OptionReader, cluster: ClusterFile | None) -> ControllerSettings:
    default = ControllerSettings()
    scale, warning = parse_scale(given.variable(SCALE_VARIABLE))
    open_admission = given.flag("open-admission") or (cluster is not None and cluster.open_admission)
    warnings = [] if warning is None else [warning]
    token, token_source = _token(given, cluster, open_admission, warnings.append)
    nccl = given.choice("backend", {"nccl": True, "cpu": False}, True)
    chosen = given.get("rendezvous")
    rendezvous = ("native" if nccl else "off") if chosen is None else chosen
    backends = _backends(given, rendezvous)
    limits = Limits.at(scale)
    port_file, state_dir = given.get("port-file"), given.get("state-dir")
    return ControllerSettings(
        token=token,
        token_source=token_source,
        run=RunSettings(
            window=_window(given, scale),
            nccl=nccl,
            dataset_sig=given.signature("dataset-sig"),
            model_sig=given.signature("model-sig"),
            on_loss=given.choice("on-loss", by_word(OnLoss), OnLoss.ABORT),
            launch=_launch(given, cluster),
            one_salt=bool(backends),
            store=_store(given),
            linger_secs=limits.linger,
        ),
        limits=limits,
        backends=backends,
        native_rendezvous=rendezvous == "native",
        interface=given.get("interface") or "",
        port=_port(given),
        port_file=None if port_file is None else Path(port_file).absolute(),
        open_admission=open_admission,
        after_run=given.choice("after-run", by_word(AfterRun), AfterRun.EXIT),
        max_pending=given.whole("max-pending", 1, MAX_COUNT, default.max_pending),
        max_pending_per_host=given.whole("max-pending-per-host", 1, MAX_COUNT, default.max_pending_per_host),
        allowed_hosts=_allowed_hosts(given),
        state_dir=Path(state_dir).absolute() if state_dir else None,
        advertised=None if cluster is None else cluster.host,
        warnings=(*warnings, *_readable_token(given, cluster), *(() if cluster is None else cluster.notes)),
    )


def _token(
    given: OptionReader, cluster: ClusterFile | None, open_admission: bool, tell: Tell
) -> tuple[bytes | None, str | None]:
    """The operator's token, from the first of its sources, and what gave it."""
    token, source = given_token(given, tell)
    asks = "--token-file" if given.get("token-file") is not None else TOKEN_VARIABLE
    if token is None and cluster is not None and cluster.token is not None:
        token, source, asks = cluster.token, shown_path(given.get("cluster") or ""), "the cluster file's token"
    if token is not None and open_admission:
        raise SettingError("--open-admission", "", f"{asks} asks for credentialed admission", "drop one of the two")
    return token, source


def _readable_token(given: OptionReader, cluster: ClusterFile | None) -> tuple[str, ...]:
    path = given.get("cluster")
    if path is None or cluster is None or cluster.token is None:
        return ()
    warning = readable_token("--cluster", path)
    return () if warning is None else (warning,)


def _window(given: OptionReader, scale: float) -> WindowSettings:
    default = WindowSettings()
    join_timeout = given.whole("join-timeout", 1, MAX_SECONDS, default.join_timeout)
    # The default follows a window that was made longer than it.
    cap = given.whole("max-join-timeout", 1, MAX_SECONDS, max(default.max_join_timeout, join_timeout))
    settings = WindowSettings(
        min_rank_start=given.whole("min-rank-start", 1, MAX_COUNT, default.min_rank_start),
        target_ranks=given.whole("target-ranks", 1, MAX_COUNT, None),
        join_timeout=join_timeout,
        max_join_timeout=cap,
        start_mode=given.choice("start", by_word(StartMode), default.start_mode),
        max_rejects=given.whole("max-rejects", 0, MAX_COUNT, default.max_rejects),
        window_secs=scaled(join_timeout, scale),
        cap_secs=scaled(cap, scale),
    )
    settings.check(given.source)
    return settings


def _backends(given: OptionReader, rendezvous: str) -> dict[str, str]:
    """The channels that are forwarded, by name, with their endpoints."""
    named = {name: given.get(name) for name in ("data", "control")}
    if rendezvous not in ("native", "off"):
        named["rendezvous"] = rendezvous
    backends = {name: endpoint for name, endpoint in named.items() if endpoint is not None}
    for name, endpoint in backends.items():
        try:
            parse_backend(endpoint)
        except ValueError as error:
            words = "native, off, " if name == "rendezvous" else ""
            raise SettingError(
                f"--{name}", repr(endpoint), f"it names no backend ({error})", f"give {words}tcp:HOST:PORT or unix:PATH"
            ) from None
    return backends


def _store(given: OptionReader) -> StoreLimits | None:
    """What torch's store may hold; None where it is off."""
    default = StoreLimits()
    limits = StoreLimits(
        total_bytes=given.whole("store-max-bytes", 1 << 20, 1 << 40, default.total_bytes),
        total_keys=given.whole("store-max-keys", 1, MAX_COUNT, default.total_keys),
    )
    return limits if given.choice("store", {"native": True, "off": False}, True) else None


def _launch(given: OptionReader, cluster: ClusterFile | None) -> LaunchSettings:
    relay = None
    if given.get("control") is not None:
        ceiling = given.whole("frame-ceiling", 4096, 1 << 40, RelaySettings().frame_ceiling)
        relay = RelaySettings(data_channel=given.get("data") is not None, frame_ceiling=ceiling)
    roster = {} if cluster is None else cluster.roster
    walk_in = WorkerFields() if cluster is None else cluster.walk_in
    walk_in = replace(walk_in, nccl_socket_ifname=given.text("nccl-socket-ifname") or "")
    return LaunchSettings(roster, walk_in, relay)


def _allowed_hosts(given: OptionReader) -> tuple[str, ...]:
    names = given.texts("allowed-host")
    for name in names:
        if not _HOST_NAME.fullmatch(name):
            raise SettingError("--allowed-host", repr(name), "it is no host name", "give it alone, without a port")
    return names


def _port(given: OptionReader) -> int:
    port = given.whole("port", 0, 65535, DEFAULT_PORT)
    if port == 0 and given.get("port-file") is None:
        limit = "the system would choose one that nobody is told"
        raise SettingError("--port", 0, limit, "name a --port-file, or a port")
    return port
