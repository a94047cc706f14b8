"""Forwarded channels beside HAProxy, in one run of a judge that both are strangers to.

The judge (``fwdbench.py`` with its load generator) is not part of this
project; ``--judge`` names its folder, which is copied before it is built and
run.  Needs ``rustc`` and ``haproxy``.  Prints the judge's tables.

usage: forward.py --judge FOLDER [--tests check,stall,...] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASE_PORT = 19101
CHANNELS = ("rendezvous", "data", "control")


def start_controller(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The real controller through twistd, with the judge's backends behind its channels."""
    port_file = folder / "port"
    backends = [f"--{name}=tcp:127.0.0.1:{BASE_PORT + offset}" for offset, name in enumerate(CHANNELS)]
    command = [
        str(Path(sys.executable).with_name("twistd")),
        *("-n", "--pidfile=", f"--logfile={folder}/log", "flodl-controller", "--interface=127.0.0.1", "--port=0"),
        *(f"--port-file={port_file}", f"--state-dir={folder}/state", *backends),
    ]
    root = str(Path(__file__).parent.parent)
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": root})
    deadline = time.monotonic() + 30
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit("the controller did not start")
        time.sleep(0.02)
    return process, int(port_file.read_text())


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
        process, port = start_controller(Path(made))
        try:
            command = [
                *(sys.executable, str(judge / "fwdbench.py"), "--front", f"flodl-tw=127.0.0.1:{port},http=/state.json"),
                *("--peers", str(judge / "peers" / "peers.json"), "--only", "haproxy", "--versus", "direct,haproxy"),
                *("--rounds", str(arguments.rounds), "--tests", arguments.tests, "--logs", str(Path(made, "logs"))),
            ]
            return subprocess.run(command, check=False, stderr=subprocess.DEVNULL, timeout=1500).returncode
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    sys.exit(main())
