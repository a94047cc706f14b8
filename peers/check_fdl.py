"""The real ``fdl`` against this project: status and start in every phase, by address and by name, and its join.

``fdl join`` starts our own agent as its program.  It looks for GPUs first, so
it runs in a mount namespace where a driver seems to be loaded, with a stand-in
for nvidia-smi; without root, or where that cannot be made, this part is skipped.

Builds flodl-cli with cargo into a cache folder outside the checkout (minutes
the first time), and says so and stops where there is no cargo.

usage: check_fdl.py
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flodl_tw.testing import SimulatedClient, make_hello

VERSION = "0.8.0"
TOKEN = bytes(range(16))
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flodl-tw", f"fdl-{VERSION}")
PATIENCE = 20.0


def built() -> Path | None:
    """The fdl program, built if it has to be; None where it cannot be."""
    program = CACHE / "bin" / "fdl"
    if program.exists():
        return program
    cargo = shutil.which("cargo")
    if cargo is None:
        return None
    print(f"building flodl-cli {VERSION} into {CACHE}, once", flush=True)
    command = [cargo, "install", "flodl-cli", "--version", VERSION, "--locked", "--quiet", "--root", str(CACHE)]
    subprocess.run(command, check=True, timeout=3600)
    return program


@contextmanager
def controller(*options: str, token: bool = False) -> Iterator[int]:
    """A controller on loopback; gives its port."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder, "port")
        if token:
            token_file = Path(folder, "token")
            token_file.write_text(TOKEN.hex())
            token_file.chmod(0o600)
            options = ("--token-file", str(token_file), *options)
        twistd = str(Path(sys.executable).with_name("twistd"))
        arguments = [*("--port", "0", "--port-file", str(port_file), "--interface", "127.0.0.1"), *options]
        arguments += ["--state-dir", str(Path(folder, "state")), "--after-run", "hold"]
        command = [twistd, "-n", "--pidfile=", f"--logfile={folder}/log", "flodl-controller", *arguments]
        process = subprocess.Popen(command, cwd=folder)
        try:
            deadline = time.monotonic() + PATIENCE
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the controller did not start: {' '.join(command)}")
                time.sleep(0.02)
            yield int(port_file.read_text())
        finally:
            process.kill()
            process.wait()


class Host:
    """A joined host, over a blocking socket."""

    def __init__(self, port: int, name: str = "gpu-a", devices: int = 2, *, token: bool = False) -> None:
        self.talk = SimulatedClient(token=TOKEN if token else None)
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.socket.sendall(self.talk.hello(make_hello(name, devices)))
        self.wait(lambda: bool(self.talk.ranks))

    def wait(self, happened: Callable[[], bool]) -> None:
        """Read until it has happened."""
        while not happened():
            data = self.socket.recv(65536)
            if not data:
                raise SystemExit("the controller closed a host's link")
            self.talk.feed(data)

    def formed(self) -> None:
        """Wait for the world."""
        self.wait(lambda: self.talk.envelope is not None)

    def finish(self, code: int = 0) -> None:
        """Report every rank's exit, and close."""
        self.socket.sendall(b"".join(self.talk.exited(rank, code) for rank in self.talk.ranks))
        self.socket.close()


class Checks:
    """Runs fdl, and counts what came of it."""

    def __init__(self, fdl: Path) -> None:
        self.fdl = fdl
        self.passed = 0
        self.failed = 0

    def check(self, name: str, ok: bool, said: str) -> None:
        """Count one result; a failure is shown with what fdl said."""
        self.passed += ok
        self.failed += not ok
        print(f"{'ok    ' if ok else 'FAILED'} {name}" + ("" if ok else f"\n{said}"), flush=True)

    def run(self, *arguments: str) -> tuple[int, str]:
        """fdl's exit status, and all that it printed."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [str(self.fdl), *arguments], capture_output=True, text=True, timeout=PATIENCE, cwd=folder, check=False
            )
        return done.returncode, done.stdout + done.stderr

    def status(self, name: str, port: int, phase: str, *parts: str) -> None:
        """``fdl status`` says the phase and the parts, for people and as JSON, by address and by name."""
        for host in ("127.0.0.1", "localhost"):
            code, said = self.run("status", "--addr", f"{host}:{port}")
            self.check(f"status, {name}, {host}", code == 0 and all(part in said for part in (phase, *parts)), said)
        code, said = self.run("status", "--addr", f"127.0.0.1:{port}", "--json")
        found = json.loads(said).get("phase") if code == 0 else None
        self.check(f"status --json, {name}", found == phase, said)

    def refused(self, name: str, port: int, *parts: str) -> None:
        """``fdl start`` is refused with the parts, by address and by name."""
        for host in ("127.0.0.1", "localhost"):
            code, said = self.run("start", "--addr", f"{host}:{port}")
            self.check(f"start refused, {name}, {host}", code == 1 and all(part in said for part in parts), said)


def every_phase(checks: Checks) -> None:
    """One manual run from its opening to its end."""
    with controller("--start", "manual", "--min-rank-start", "2") as port:
        checks.status("waiting", port, "waiting", "none joined yet")
        checks.refused("before the quorum", port, "409", "quorum not met")
        host = Host(port)
        checks.status("staging", port, "staging", "gpu-a", "2 joined across 1 host")
        code, said = checks.run("start", "--addr", f"127.0.0.1:{port}")
        checks.check("start by address", code == 0, said)
        host.formed()
        checks.status("training", port, "training", "gpu-a")
        checks.refused("after the close", port, "409", "training")
        host.finish()
        checks.status("done", port, "done", "gpu-a")
    with controller("--start", "hybrid", "--min-rank-start", "2") as port:
        host = Host(port)
        code, said = checks.run("start", "--addr", f"localhost:{port}")
        checks.check("start by name", code == 0, said)
        host.formed()
        host.finish(code=3)
        checks.status("failed", port, "failed", "gpu-a")
        checks.refused("after the failure", port, "409", "failed")
    with controller() as port:
        checks.refused("in auto mode", port, "409", "auto")


def with_a_token(checks: Checks) -> None:
    """A credentialed controller: its token from anywhere, and none needed on its own machine."""
    for arguments in ((), ("--token", TOKEN.hex()), ("--token", "ff" * 16)):
        for host in ("127.0.0.1", "localhost"):
            with controller("--start", "manual", "--min-rank-start", "2", token=True) as port:
                joined = Host(port, token=True)
                code, said = checks.run("start", "--addr", f"{host}:{port}", *arguments)
                what = {0: "without a token", 2: "with a token"}[len(arguments)]
                checks.check(f"start from loopback {what}, {host}", code == 0, said)
                joined.formed()


GPUS = """#!/bin/sh
case "$*" in
*query-gpu=*) for index in 0 1; do
    row=""
    for field in $(echo "$*" | sed 's/.*--query-gpu=\\([^ ]*\\).*/\\1/' | tr , ' '); do
        case $field in
        index) value=$index ;;
        name) value="NVIDIA H100" ;;
        uuid) value="GPU-0000000$index" ;;
        memory.total) value=81559 ;;
        compute_cap) value=9.0 ;;
        *) value=0 ;;
        esac
        row="$row, $value"
    done
    echo "${row#, }"
done ;;
esac
"""
DRIVER = 'mount -t tmpfs driver /proc/driver && mkdir /proc/driver/nvidia && exec "$@"'
PROGRAM = """
import os, sys
if os.environ.get("FLODL_INTERNAL_MODEL_SIG_PROBE"):
    sys.exit("only probed")
names = ("RANK", "WORLD_SIZE", "FLODL_INTERNAL_LOCAL_RANK", "FLODL_HOST_NAME", "CUDA_VISIBLE_DEVICES")
print(*(f"{name}={os.environ[name]}" for name in names))
print("clean" if not any(name in os.environ for name in ("FLODL_INTERNAL_AGENT_JSON", "FLODL_JOIN_TOKEN")) else "leak")
print("leak" if sys.argv[1] in str(os.environ) else "no token", flush=True)
# A rank that fails ends the others, so rank 1 does not end before rank 0 has said all that it has to say.
open(sys.argv[3], "w" if os.environ["RANK"] == "0" else "r").close()
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
"""


def joining(checks: Checks) -> None:
    """``fdl join`` with our agent as its program."""
    with tempfile.TemporaryDirectory() as folder:
        tool = Path(folder, "nvidia-smi")
        tool.write_text(GPUS)
        tool.chmod(0o755)
        spoken = Path(folder, "spoken")
        os.mkfifo(spoken)
        around = ["unshare", "--mount", "sh", "-c", DRIVER, "sh"]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*around, "true"], check=False, capture_output=True).returncode
        ):
            print("skipped: fdl join, since this user can make no mount namespace")
            return
        agent = str(Path(sys.executable).with_name("flodl-tw-agent"))
        environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FLODL_HOST_NAME": "gpu-a"}
        for token, code in ((False, 0), (True, 0), (False, 5)):
            with controller("--target-ranks", "2", token=token) as port:
                words = [*around, str(checks.fdl), "join", f"127.0.0.1:{port}", "--host", "gpu-a", "--bin", agent]
                words += ["--token", TOKEN.hex()] if token else []
                words += ["--", sys.executable, "-c", PROGRAM, TOKEN.hex(), str(code), str(spoken)]
                done = subprocess.run(
                    words, capture_output=True, text=True, timeout=60, cwd=folder, env=environ, check=False
                )
                said = done.stdout + done.stderr
                what = f"join, ranks end with {code}" + (", with a token" if token else "")
                wanted = [
                    f"[gpu-a:r{rank}] RANK={rank} WORLD_SIZE=2 FLODL_INTERNAL_LOCAL_RANK={rank} FLODL_HOST_NAME=gpu-a "
                    f"CUDA_VISIBLE_DEVICES={rank}"
                    for rank in (0, 1)
                ]
                ok = done.returncode == code and all(line in said for line in wanted) and "only probed" in said
                checks.check(what, ok and "clean" in said and "leak" not in said.replace(PROGRAM, ""), said)
                checks.status(what, port, "failed" if code else "done", "gpu-a", "NVIDIA H100")


def main() -> int:
    """Run all; the exit status is 0 if all passed, or if there is nothing to run them with."""
    fdl = built()
    if fdl is None:
        print("skipped: no cargo here, which the real fdl is built with")
        return 0
    checks = Checks(fdl)
    every_phase(checks)
    with_a_token(checks)
    joining(checks)
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
