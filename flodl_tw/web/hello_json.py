"""A hello as JSON, for ``POST /check``: the keys are the names of its fields, and ``version`` the protocol's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from flodl_tw.core.fields import is_text, read_object, shown
from flodl_tw.core.messages import SIGNATURE_BYTES, VERSIONS, Hello

MAX_U32: Final = (1 << 32) - 1
_SIGNATURE = re.compile(rf"[0-9a-fA-F]{{{2 * SIGNATURE_BYTES}}}")


def hello_to_json(hello: Hello, version: int) -> dict[str, Any]:
    """The object that ``hello_from_json`` reads; a field that the hello does not state is left out."""
    told: dict[str, Any] = {
        "host": hello.host,
        "local_devices": list(hello.local_devices),
        "gpus": list(hello.gpus),
        "libtorch": hello.libtorch,
        "dataset_sig": hello.dataset_sig.hex(),
    }
    if hello.run_id is not None:
        told["run_id"] = hello.run_id
    if hello.nccl_version is not None:
        told["nccl_version"] = list(hello.nccl_version)
    if hello.model_sig is not None:
        told["model_sig"] = hello.model_sig.hex()
    return {**told, "version": version}


def _wrong(key: str, value: Any, limit: str) -> ValueError:
    return ValueError(f"{key} {shown(value)}: it must be {limit}")


def _whole(value: Any, most: int) -> bool:
    # A bool is an int to Python, and a 1.0 equals one.
    return type(value) is int and 0 <= value <= most


def _text(key: str, value: Any) -> str:
    if not is_text(value):
        raise _wrong(key, value, "a text, in characters that UTF-8 has")
    text: str = value
    return text


def _items(key: str, value: Any, fits: Callable[[Any], bool], limit: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(key, value, f"a list of {limit}")
    for item in value:
        if not fits(item):
            raise ValueError(f"{key} has {shown(item)}: it must be a list of {limit}")
    return value


def _devices(key: str, value: Any) -> bytes:
    return bytes(_items(key, value, lambda item: _whole(item, 255), "device indices, whole numbers from 0 to 255"))


def _texts(key: str, value: Any) -> tuple[str, ...]:
    return tuple(_items(key, value, is_text, "texts, in characters that UTF-8 has"))


def _triple(key: str, value: Any) -> tuple[int, int, int]:
    limit = f"three whole numbers from 0 to {MAX_U32}: major, minor and patch"
    items = _items(key, value, lambda item: _whole(item, MAX_U32), limit)
    if len(items) != 3:
        raise _wrong(key, value, f"a list of {limit}")
    return items[0], items[1], items[2]


def _signature(key: str, value: Any) -> bytes:
    if not (isinstance(value, str) and _SIGNATURE.fullmatch(value)):
        raise _wrong(key, value, f"{2 * SIGNATURE_BYTES} hex digits")
    return bytes.fromhex(value)


def _version(key: str, value: Any) -> int:
    if not _whole(value, MAX_U32):
        raise _wrong(key, value, f"a whole number from 0 to {MAX_U32}")
    number: int = value
    return number


_REQUIRED: Final[dict[str, Callable[[str, Any], Any]]] = {
    "host": _text,
    "local_devices": _devices,
    "gpus": _texts,
    "libtorch": _text,
    "dataset_sig": _signature,
}
_OPTIONAL: Final[dict[str, Callable[[str, Any], Any]]] = {
    "run_id": _text,
    "nccl_version": _triple,
    "model_sig": _signature,
    "version": _version,
}


def hello_from_json(data: bytes) -> tuple[Hello, int]:
    """The hello that a request's body holds, and its protocol version (the newest, where it states none).

    Raises ValueError with a text that names the key, the value and the limit.
    """
    given = read_object(data, _REQUIRED, _OPTIONAL)
    readers = _REQUIRED | _OPTIONAL
    fields = {key: readers[key](key, value) for key, value in given.items()}
    version = fields.pop("version", VERSIONS[-1])
    for key in ("run_id", "nccl_version", "model_sig"):
        if version == 2 and key in fields:
            raise ValueError(f"{key} {shown(given[key])}: a hello of version 2 has no such field: leave it out")
    return Hello(**fields), version
