"""A hello as JSON, for ``POST /check``: the keys are the names of its fields, and ``version`` the protocol's."""

from __future__ import annotations

from typing import Final

from flodl_tw.core.fields import MAX_U32, Fields, decode_object
from flodl_tw.core.messages import SIGNATURE_BYTES, VERSIONS, Hello

_REQUIRED: Final = ("host", "local_devices", "gpus", "libtorch", "dataset_sig")
_OPTIONAL: Final = ("run_id", "nccl_version", "model_sig")
"""Fields that a hello of version 2 does not have."""


def hello_to_json(hello: Hello, version: int) -> dict[str, object]:
    """The object that ``hello_from_json`` reads; a field that the hello does not state is left out."""
    told: dict[str, object] = {
        "host": hello.host,
        "local_devices": list(hello.local_devices),
        "gpus": list(hello.gpus),
        "libtorch": hello.libtorch,
        "dataset_sig": hello.dataset_sig.hex(),
        "run_id": hello.run_id,
        "nccl_version": hello.nccl_version and list(hello.nccl_version),
        "model_sig": hello.model_sig and hello.model_sig.hex(),
        "version": version,
    }
    return {key: value for key, value in told.items() if value is not None}


def hello_from_json(data: bytes) -> tuple[Hello, int]:
    """The hello that a request's body holds, and its protocol version (the newest, where it states none).

    Raises ValueError with a text that names the key, the value and the limit.
    """
    fields = Fields(decode_object(data, "the body"))
    fields.only(_REQUIRED, (*_OPTIONAL, "version"))
    hello = Hello(
        host=fields.text("host"),
        local_devices=bytes(fields.wholes("local_devices", 0, 255)),
        gpus=fields.texts("gpus"),
        libtorch=fields.text("libtorch"),
        dataset_sig=fields.from_hex("dataset_sig", SIGNATURE_BYTES),
        run_id=fields.text("run_id") if "run_id" in fields else None,
        nccl_version=_triple(fields, "nccl_version") if "nccl_version" in fields else None,
        model_sig=fields.from_hex("model_sig", SIGNATURE_BYTES) if "model_sig" in fields else None,
    )
    version = fields.whole("version", 0, MAX_U32) if "version" in fields else VERSIONS[-1]
    for key in _OPTIONAL:
        if version == 2 and key in fields:
            raise fields.wrong(key, "left out: a hello of version 2 has no such field")
    return hello, version


def _triple(fields: Fields, key: str) -> tuple[int, int, int]:
    major, minor, patch = fields.wholes(key, 0, MAX_U32, count=3)
    return major, minor, patch
