"""What a launcher tells an agent: the hex of a JSON object in ``FLODL_INTERNAL_AGENT_JSON``, as ``fdl join`` gives it.

Law: flodl's own keys.  The object may hold the token, so no error shows its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from flodl_tw.agent.settings import BOOTSTRAP_VARIABLE
from flodl_tw.core.addresses import MAX_PORT, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.fields import Fields, ShapeError, decode_hex_object
from flodl_tw.core.tokens import parse_token

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


def read_bootstrap(text: str) -> Bootstrap:
    """The orders that ``text`` holds; SettingError where it holds none."""
    try:
        spec = decode_hex_object(text, "it")
    except ShapeError:
        raise _refused("it is no hex of a JSON object") from None
    try:
        return _bootstrap(Fields(spec, "its ", shows=False))
    except ShapeError as error:
        raise _refused(str(error)) from None


def _bootstrap(fields: Fields) -> Bootstrap:
    port = fields.whole("controller_port", 1, MAX_PORT)
    options = {"controller": show_endpoint(fields.text("controller_host"), port)}
    for key, option in _OPTIONS.items():
        value = fields.optional(key, fields.text)
        if value is not None:
            options[option] = value
    share = fields.optional("gpu_ram_share", fields.number)
    if share is not None:
        # As Python writes it: it reads the same number again.
        options["gpu-ram-share"] = str(share)
    devices = fields.optional("local_devices", lambda key: fields.wholes(key, 0, 255)) or ()
    salt = fields.optional("salt_hex", fields.text)
    token = parse_token(salt, f"{BOOTSTRAP_VARIABLE}'s salt_hex") if salt else None
    return Bootstrap(options, token, devices or None)
