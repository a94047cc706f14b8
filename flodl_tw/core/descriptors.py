"""The three descriptors that every program expects to be open."""

from __future__ import annotations

import os


def open_standard_descriptors() -> None:
    """Open those that are closed to nowhere: the next file or socket would take their places."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
