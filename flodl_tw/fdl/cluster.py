"""The ``cluster:`` block of a flodl user's ``fdl.yml``, or a file that is that block, YAML or JSON.

What its keys mean to a controller.  Which values contradict each other is
judged where the options are, which win over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from flodl_tw.agent.rank_environ import is_per_rank
from flodl_tw.core.addresses import FDL_PORT
from flodl_tw.core.window import StartMode
from flodl_tw.core.world import WorkerFields, wrong_environ
from flodl_tw.fdl.yaml_document import read_document
from flodl_tw.fdl.yaml_nodes import Block, Value
from flodl_tw.options import Placed, by_word

MAX_RANK: Final = 1 << 31
MAX_DEVICE: Final = 255
FDL_KEYS: Final = ("description", "commands", "join", "publish", "inherit-from")
"""What else stands at the top of an fdl.yml."""
CONTROLLERS_OWN: Final = ("path", "docker", "arch", "data_path")
WORKERS_OWN: Final = ("ssh", "docker")
"""Keys for what flodl does itself: it starts its own programs, by ssh and in containers."""
SHOWN_UNUSED: Final = 8
KNOWN_KEYS: Final = {
    level: keys.split()
    for level, keys in {
        # The keys of a level, and after them flodl's others, which are accepted and unused.
        "cluster": "controller workers gpu_ram_share env",
        "controller": "host port join path docker arch data_path",
        "join": "min_rank_start target_ranks join_timeout max_join_timeout start discovery open_admission token "
        "tunnel_only",
        "worker": "host ranks local_devices nccl_socket_ifname path arch data_path gpu_ram_share tunnel ssh docker env",
        "ssh": "target port user identity_file options",
    }.items()
}


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """All that the file says: option texts by long name, and what no option takes.

    ``roster`` is what each worker is sent, by host, and ``walk_in`` any
    other: the fleet's share of memory and variables are a worker's where it
    has no own.  ``host`` is where workers dial.  ``notes`` are lines for people.
    """

    options: Mapping[str, Placed]
    roster: Mapping[str, WorkerFields]
    token: bytes | None = field(repr=False)
    open_admission: bool
    walk_in: WorkerFields
    host: str
    notes: tuple[str, ...] = ()


def read_cluster_file(path: str, start: str | None = None) -> ClusterFile:
    """What the file says to a controller whose command line gave ``start``; SettingError where it can't be used.

    Nothing is opened but the file, and no option's default is filled in but the port's, the quorum and the target.
    """
    root = read_document(path, "--cluster", "cluster")
    cluster = _cluster_block(root)
    needed = cluster.need("controller", "it has the host, the port and the join block")
    controller = needed.block(KNOWN_KEYS["controller"])
    dialed = controller.need("host", "give the name or address that workers dial").text()
    join = controller.get("join", lambda value: value.block(KNOWN_KEYS["join"]))
    join = join or Block(controller.location.below("join", controller.location.line), {})
    discovery = bool(join.get("discovery", Value.flag))
    walk_in = WorkerFields(
        gpu_ram_share=cluster.get("gpu_ram_share", Value.share), environ=cluster.get("env", _environ) or {}
    )
    workers = [item.block(KNOWN_KEYS["worker"]) for item in cluster.get("workers", Value.items) or []]
    if not workers and not discovery:
        raise cluster.missing("workers", "list one or more, or set controller.join.discovery: true")
    roster: dict[str, WorkerFields] = {}
    for worker in workers:
        host = worker.need("host", "give the name that the worker joins with")
        if host.text() in roster:
            raise host.error("another worker has this host, too", "give each worker its own")
        roster[host.text()] = _fields(worker, walk_in)
    ranks = _ranks(cluster, workers)
    options = {
        "port": Placed(str(FDL_PORT), str(controller.location)),
        **controller.options({"port": Value.whole}),
        **_window(join, None if discovery else ranks, start),
    }
    tunnels = [bool(worker.get("tunnel", Value.flag)) for worker in workers]
    if join.get("tunnel_only", Value.flag) or (tunnels and all(tunnels)):
        options["interface"] = Placed("127.0.0.1", str(join.location))
    open_admission = bool(join.get("open_admission", Value.flag))
    notes = tuple(_notes(root, cluster, [(controller, CONTROLLERS_OWN), *((each, WORKERS_OWN) for each in workers)]))
    return ClusterFile(options, roster, join.get("token", Value.token), open_admission, walk_in, dialed, notes)


def _environ(value: Value) -> dict[str, str]:
    environ = {name: text.plain() for name, text in value.entries().items()}
    wrong = wrong_environ(environ)
    if wrong is not None:
        raise value.location.error(f"these cannot be a rank's variables: {wrong}", "mend it, or drop it")
    return {name: text for name, text in environ.items() if not is_per_rank(name)}


def _notes(root: Value, cluster: Block, blocks: Sequence[tuple[Block, Sequence[str]]]) -> Iterator[str]:
    """What of the file comes to nothing, with its lines."""
    inherits = root.entries().get("inherit-from")
    if inherits is not None and inherits.kind != "null":
        yield f"{inherits.location}: it is not merged: what the controller is to know stands in this file alone"
    unused = [block.values[key].location for block, keys in blocks for key in keys if key in block.values]
    for block in (cluster, *(block for block, _ in blocks)):
        named = block.get("env", Value.entries) or {}
        unused += [value.location for name, value in named.items() if is_per_rank(name)]
    if unused:
        shown = ", ".join(f"{place.path} (line {place.line})" for place in unused[:SHOWN_UNUSED])
        more = f" and {len(unused) - SHOWN_UNUSED} more" if len(unused) > SHOWN_UNUSED else ""
        yield f"{root.location.file}: flodl-tw has no use for {shown}{more}"


def _cluster_block(root: Value) -> Block:
    """The block, whether the file has it or is it."""
    found = root.entries()
    if "cluster" in found and found["cluster"].kind != "null":
        return found["cluster"].block(KNOWN_KEYS["cluster"])
    if "controller" not in found and ("cluster" in found or any(name in found for name in FDL_KEYS)):
        raise root.location.error("it has no cluster: block", "name the file that has one; an fdl.NAME.yml often does")
    return root.block([*KNOWN_KEYS["cluster"], "cluster"])


def _fields(worker: Block, fleet: WorkerFields) -> WorkerFields:
    worker.get("ssh", lambda value: value.block(KNOWN_KEYS["ssh"]))
    own = worker.get("gpu_ram_share", Value.share)
    environ = {**fleet.environ, **(worker.get("env", _environ) or {})}
    wrong = wrong_environ(environ)
    if wrong is not None:
        raise worker.values["env"].location.error(f"with the cluster's {wrong}", "give fewer variables")
    return WorkerFields(
        nccl_socket_ifname=worker.need("nccl_socket_ifname", "name the interface that NCCL uses there").text(),
        path=worker.need("path", "give the project's folder on that host").text(),
        arch=worker.get("arch", Value.text),
        data_path=worker.get("data_path", Value.text),
        gpu_ram_share=fleet.gpu_ram_share if own is None else own,
        environ=environ,
    )


def read_devices(value: Value) -> tuple[int, ...] | None:
    """A list of devices; None for all."""
    if value.scalar is None:
        return value.wholes(MAX_DEVICE)
    if value.kind != "str" or value.scalar != "all":
        raise value.error("it must be a list of devices, or the word all", "write it as [0, 1], or all")
    return None


def _ranks(cluster: Block, workers: Sequence[Block]) -> Placed | None:
    """How many ranks the roster has; None where only its hosts know.

    Without ranks, which flodl wants of its users, it has one for each device.
    """
    given, devices = [], []
    for worker in workers:
        given.append(worker.get("ranks", lambda value: value.wholes(MAX_RANK)) or ())
        listed = worker.need("local_devices", "list the worker's devices, or write all")
        devices.append(read_devices(listed))
        if devices[-1] == ():
            raise listed.location.error("it has no device", "list one or more, or write all")
    count = sum(map(len, given))
    if count and not (all(given) and sorted(chain(*given)) == list(range(count))):
        limit = f"the ranks of its workers must be 0 to {count - 1}, each once, and each worker must have some"
        raise cluster.values["workers"].location.error(limit, "number them without a gap, or drop them all")
    if not count and None not in devices:
        count = sum(len(each or ()) for each in devices)
    return Placed(str(count), f"{cluster.location.file}: the roster's ranks") if count else None


def _window(join: Block, ranks: Placed | None, start: str | None) -> dict[str, Placed]:
    """The window as the file asks for it: quorum and target are the roster's ranks where it does not name them."""
    options = join.options(
        {
            "start": _start,
            **dict.fromkeys(("min_rank_start", "target_ranks", "join_timeout", "max_join_timeout"), Value.whole),
        }
    )
    if ranks is not None:
        options.setdefault("min-rank-start", ranks)
    if "min-rank-start" not in options:
        why = "with discovery: true" if join.get("discovery", Value.flag) else "with local_devices: all and no ranks"
        raise join.missing("min_rank_start", f"{why} the roster can't tell it: give the ranks that a world needs")
    if start == StartMode.MANUAL.value:
        options.pop("target-ranks", None)
    elif ranks is not None and (start or join.get("start", _start)) != StartMode.MANUAL.value:
        options.setdefault("target-ranks", ranks)
    return options


def _start(value: Value) -> str:
    if value.text() not in by_word(StartMode):
        raise value.error(f"the choices are {', '.join(by_word(StartMode))}", "give one of them")
    return value.text()
