"""What a launcher tells an agent: the hex of a JSON object in ``FLODL_INTERNAL_AGENT_JSON``, as ``fdl join`` gives it.

Law: flodl's own keys.  The object may hold the token, so no error shows its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flodl_tw.agent.settings import BOOTSTRAP_VARIABLE
from flodl_tw.core.addresses import MAX_PORT, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.ledger import MAX_DEVICES
from flodl_tw.state_folder import parse_token

PROBE_VARIABLE: Final = "FLODL_INTERNAL_MODEL_SIG_PROBE"
"""A launcher that sets it wants the program's model signature, and nothing else."""
_OPTIONS: Final = {
    "host": "host",
    "libtorch": "libtorch",
    "dataset_sig_hex": "dataset-sig",
    "run_id": "run-id",
    "data_path": "data-path",
    "model_sig_hex": "model-sig",
}
"""Texts of the object, and the options that they are."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A launcher's orders: option texts by long name, and what no option takes.

    ``token`` is 16 bytes; ``local_devices`` are physical indexes.
    """

    options: dict[str, str]
    token: bytes | None = field(default=None, repr=False)
    local_devices: tuple[int, ...] | None = None


def _refused(what: str) -> SettingError:
    return SettingError(
        BOOTSTRAP_VARIABLE, "(not shown)", what, "start this program with fdl join --bin, or use flodl-tw join"
    )


def _of(spec: Mapping[str, Any], key: str, kind: type, needed: bool = False) -> Any:
    value = spec.get(key)
    if value is None:
        if needed:
            raise _refused(f"its {key} is missing")
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _refused(f"its {key} is no {'text' if kind is str else 'number'}")
    return value


def _devices(spec: Mapping[str, Any]) -> tuple[int, ...] | None:
    listed = spec.get("local_devices")
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) > MAX_DEVICES:
        raise _refused(f"its local_devices is no list of at most {MAX_DEVICES}")
    if any(type(device) is not int or not 0 <= device <= 255 for device in listed):
        raise _refused("its local_devices has an entry that is no number from 0 to 255")
    return tuple(listed) or None


def read_bootstrap(text: str) -> Bootstrap:
    """The orders that ``text`` holds; SettingError where it holds none."""
    try:
        spec = json.loads(bytes.fromhex(text))
    except (ValueError, RecursionError):
        raise _refused("it is no hex of JSON") from None
    if not isinstance(spec, dict):
        raise _refused("it is no JSON object")
    options = {option: value for key, option in _OPTIONS.items() if (value := _of(spec, key, str)) is not None}
    port = _of(spec, "controller_port", int, needed=True)
    if not 1 <= port <= MAX_PORT:
        raise _refused(f"its controller_port is not from 1 to {MAX_PORT}")
    options["controller"] = show_endpoint(_of(spec, "controller_host", str, needed=True), port)
    share = spec.get("gpu_ram_share")
    if share is not None:
        if not isinstance(share, int | float) or isinstance(share, bool):
            raise _refused("its gpu_ram_share is no number")
        # As Python writes it: it reads the same number again.
        options["gpu-ram-share"] = str(share)
    salt = _of(spec, "salt_hex", str)
    token = None if not salt else parse_token(salt, f"{BOOTSTRAP_VARIABLE}'s salt_hex", "(not shown)")
    return Bootstrap(options, token, _devices(spec))
