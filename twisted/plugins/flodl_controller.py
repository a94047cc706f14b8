"""Tells twistd of ``flodl-controller``."""

from twisted.application.service import ServiceMaker

flodlController = ServiceMaker(
    "flodl controller",
    "flodl_tw.tap",
    "Forms a training world from hosts that dial in, on one port.",
    "flodl-controller",
)
