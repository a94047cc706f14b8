"""Forwarded channels beside HAProxy, in one run of a judge that both are strangers to.

The judge (``fwdbench.py`` with its load generator) is not part of this
project; ``--judge`` names its folder, which is copied before it is built and
run.  Needs ``rustc`` and ``haproxy``.  Prints the judge's tables.

usage: forward.py --judge FOLDER [--tests check,stall,...] [--rounds N]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shared import controller

BASE_PORT = 19101
CHANNELS = ("rendezvous", "data", "control")


def main() -> int:
    parser = argparse.ArgumentParser(description="Forwarded channels beside HAProxy.")
    parser.add_argument("--judge", type=Path, required=True, help="folder of fwdbench.py")
    parser.add_argument("--tests", default="")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        judge = Path(made, "judge")
        shutil.copytree(arguments.judge, judge)
        for path in judge.rglob("*"):
            path.chmod(path.stat().st_mode | 0o200)
        judge.chmod(0o755)
        backends = [f"--{name}=tcp:127.0.0.1:{BASE_PORT + offset}" for offset, name in enumerate(CHANNELS)]
        with controller("--interface=127.0.0.1", *backends) as server:
            front = f"flodl-tw=127.0.0.1:{server.port},http=/state.json"
            command = [
                *(sys.executable, str(judge / "fwdbench.py"), "--front", front),
                *("--peers", str(judge / "peers" / "peers.json"), "--only", "haproxy", "--versus", "direct,haproxy"),
                *("--rounds", str(arguments.rounds), "--tests", arguments.tests, "--logs", str(Path(made, "logs"))),
            ]
            return subprocess.run(command, check=False, stderr=subprocess.DEVNULL, timeout=1500).returncode


if __name__ == "__main__":
    sys.exit(main())
