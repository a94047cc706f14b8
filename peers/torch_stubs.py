"""Stand-ins for the CUDA libraries that torch's wheel is linked to, so that it can be imported without them.

Every function in them says that there is no device, which torch believes: its
ranks on a CPU need no more.  Nothing of CUDA is in them.  gcc, readelf and nm
have to be here.

usage: torch_stubs.py SITE_PACKAGES
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice."""
PYTHONS = re.compile(r"_?Py|_ITM|__gmon|__cxa_finalize")
"""What the interpreter or the loader has, or nobody needs to."""


def output(*command: str) -> str:
    """What a tool prints; it complains of files that are none of ours to mend."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout


def symbols(library: str | Path) -> tuple[set[str], dict[str, str]]:
    """The names that a library defines, and those that it wants, each with its version or none."""
    defined: set[str] = set()
    wanted: dict[str, str] = {}
    for line in output("nm", "-D", str(library)).splitlines():
        *_, kind, name = line.split()
        base, _, version = name.partition("@")
        if kind == "U":
            wanted[base] = version.lstrip("@")
        elif kind not in "wv":
            defined.add(base)
    return defined, wanted


def make(site: Path) -> list[str]:
    """Make what is missing, beside torch's own libraries; gives its names."""
    lib = site / "torch" / "lib"
    found = [*lib.glob("*.so*"), *(site / "torch").glob("_C*.so")]
    libraries = [path for path in found if "caffe2_nvrtc" not in path.name and not path.is_symlink()]
    needed = {
        name for path in libraries for name in re.findall(r"NEEDED.*\[(.*?)\]", output("readelf", "-d", str(path)))
    }
    system = dict(re.findall(r"^\s+(\S+) .*=> (\S+)", output("/sbin/ldconfig", "-p"), re.MULTILINE))
    missing = sorted(needed - {path.name for path in libraries} - set(system))
    if not missing:
        return []
    defined = set().union(
        *(symbols(path)[0] for path in (*libraries, *(system[name] for name in needed & set(system))))
    )
    homes = {version: name for path in libraries for version, name in versions(path) if name in missing}
    stubs: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for version, name in homes.items():
        stubs[name][version] = set()
    for path in libraries:
        for symbol, version in symbols(path)[1].items():
            if symbol not in defined and not PYTHONS.match(symbol):
                known = version if version in homes else ""
                stubs[homes.get(version, missing[0])][known].add(symbol)
    for name, by_version in stubs.items():
        build(lib / name, by_version)
    return missing


def versions(library: Path) -> list[tuple[str, str]]:
    """The versions that a library wants, each with the name of the library that has it."""
    found, file = [], ""
    for line in output("readelf", "-V", str(library)).splitlines():
        if of := re.search(r"File: (\S+)", line):
            file = of[1]
        elif version := re.search(r"Name: (\S+)\s+Flags", line):
            found.append((version[1], file))
    return found


def build(path: Path, by_version: dict[str, set[str]]) -> None:
    """A library whose functions all give the same number."""
    names = sorted(set().union(*by_version.values()))
    code = [f".globl {name}\n.type {name},@function\n{name}:\nmov ${NO_DEVICE},%eax\nret" for name in names]
    exports = [
        f"{version} {{ global: {''.join(f'{name}; ' for name in sorted(of))}}};"
        for version, of in sorted(by_version.items())
        if version
    ]
    with tempfile.TemporaryDirectory() as made:
        source, script = Path(made, "stubs.s"), Path(made, "versions")
        source.write_text("\n".join([".text", *code, '.section .note.GNU-stack,"",@progbits', ""]))
        script.write_text("\n".join(exports))
        command = ["gcc", "-shared", "-nostdlib", "-o", str(path), str(source), f"-Wl,-soname,{path.name}"]
        subprocess.run([*command, *([f"-Wl,--version-script={script}"] if exports else [])], check=True)


if __name__ == "__main__":
    print(*make(Path(sys.argv[1])))
