"""What can be wrong, as exceptions whose text is for people."""

from __future__ import annotations


class SettingError(ValueError):
    """A setting that cannot be used: its name, its value, the limit and the way out."""

    def __init__(self, name: str, value: object, limit: str, way_out: str) -> None:
        shown = f"{name} {value}".rstrip()
        super().__init__(f"{shown}: {limit}; {way_out}")


class NotYetError(Exception):
    """What cannot be done now, and may be at another try; the text is for people."""


class WireError(ValueError):
    """Bytes from a peer that are not what the wire allows."""


class StoreError(ValueError):
    """Bytes of a store client that are no query, or a query that is over a cap; the text is for the log."""


class ViolationError(Exception):
    """A member sent what its place in the run does not allow."""
