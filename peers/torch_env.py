"""Environments with real torch for ``tests/torch``: the newest release, and the oldest that we test with.

Each is made once, into a cache folder outside the checkout, in a minute or so,
and takes 1 to 2 GB there.  The CUDA libraries that torch's wheel wants are 3 GB
more and of no use to ranks on a CPU: ``torch_stubs.py`` makes stand-ins for
them.  Where a compiler, the disk or the network is missing, that is said, nothing
is made, and the status is 1.

usage: torch_env.py
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEWEST = "2.15.0"
OLDEST = "2.6.0" if sys.version_info < (3, 14) else "2.9.1"
"""The oldest here that has a wheel for this Python."""
VERSIONS = (OLDEST, NEWEST)
NEEDS = ("typing-extensions==4.16.0", "numpy==2.4.6", "sympy==1.13.1", "mpmath==1.3.0")
"""What torch imports on the way to DDP; its other dependencies, triton and the CUDA wheels among them, are not."""
STUBS = Path(__file__).resolve().parent / "torch_stubs.py"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flodl-tw")
MAKE_SECS = 1200.0
DISK_BYTES = 4 << 30
"""Free space to begin with: the download, what it unpacks to, and room for others."""
UNUSED = ("include", "share", "test", "bin/test_*", "lib/*.a", "testing/_internal/distributed/rpc")
"""Parts of torch that no rank reads."""
PROBE = """
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
gathered = [None]
dist.all_gather_object(gathered, torch.__version__)
print(*gathered)
dist.destroy_process_group()
"""


class CannotMakeError(Exception):
    """Something that an environment is made with is not here."""


def recipe(version: str) -> str:
    """What the marker of a complete environment says: another text, and it is made anew."""
    return "\n".join([f"Python {platform.python_version()}", f"torch=={version}", *NEEDS, ""])


def folder(version: str) -> Path:
    """Where the environment is, or would be."""
    return CACHE / f"torch-{version}"


def python_with(version: str) -> Path | None:
    """The Python that has this torch; None where its environment was not made, or for another Python."""
    marker = folder(version) / "complete"
    if not marker.exists() or marker.read_text() != recipe(version):
        return None
    return folder(version) / "bin" / "python"


def made(version: str) -> Path:
    """The Python that has this torch, made if it has to be; CannotMakeError where it can't."""
    if (found := python_with(version)) is not None:
        return found
    for tool in ("gcc", "readelf", "nm"):
        if shutil.which(tool) is None:
            raise CannotMakeError(f"there is no {tool} here, which the stand-ins for CUDA are made with")
    CACHE.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(CACHE).free
    if free < DISK_BYTES:
        raise CannotMakeError(f"{CACHE} has {free >> 20} MiB free, and this takes {DISK_BYTES >> 20}")
    with alone(version):
        if python_with(version) is None:
            make(version)
    return folder(version) / "bin" / "python"


@contextmanager
def alone(version: str) -> Iterator[None]:
    """Only one process makes it at a time; the others wait here."""
    with (CACHE / f"torch-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(version: str) -> None:
    """Make it beside its place, and put it there when it works."""
    part = CACHE / f"torch-{version}.part"
    print(f"making an environment with torch {version} at {folder(version)}, once", flush=True)
    steps = Steps()
    try:
        steps.run("a venv", sys.executable, "-m", "venv", "--clear", "--without-pip", str(part))
        python = str(part / "bin" / "python")
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
        chosen = ("--no-deps", "--no-compile", "--only-binary=:all:", f"torch=={version}", *NEEDS)
        steps.run(f"pip install torch=={version} and {len(NEEDS)} packages", *pip, *chosen)
        site = next(part.glob("lib/python*/site-packages"))
        for name in UNUSED:
            for path in (site / "torch").glob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        steps.run("stand-ins for CUDA", sys.executable, str(STUBS), str(site))
        steps.run("a world of one rank", python, "-I", "-W", "ignore", "-c", PROBE)
        (part / "complete").write_text(recipe(version))
        shutil.rmtree(folder(version), ignore_errors=True)
        part.rename(folder(version))
    finally:
        shutil.rmtree(part, ignore_errors=True)


class Steps:
    """Commands with one time limit for all of them."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAKE_SECS
        # Nothing of ours or of another environment's may be seen by the one that is made.
        self._environ = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

    def run(self, what: str, *command: str) -> None:
        """Run one; CannotMakeError, with the end of what it printed, where it fails."""
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environ,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=max(self._deadline - began, 1.0))
        except subprocess.TimeoutExpired:
            raise CannotMakeError(f"{what} did not end within {MAKE_SECS:g} s of the start") from None
        finally:
            if process.returncode is None:
                # With pip goes the second pip that it has started for the new environment.
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode:
            end = " / ".join(output.strip().splitlines()[-3:])
            raise CannotMakeError(f"{what} failed with {process.returncode}: {end}")
        print(f"  {what}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Make what can be made; status 1 where something is missing that an environment is made with."""
    status = 0
    for version in VERSIONS:
        try:
            print(f"torch {version}: {made(version)}", flush=True)
        except (CannotMakeError, OSError) as error:
            print(f"no environment with torch {version}: {error}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
