"""Pins everything: `python .ci/pin.py` resolves afresh and writes the exact versions into pyproject.toml.

uv.lock names download addresses and stays out of Git; `constraint-dependencies` hold the same versions without them.
A package that uv locked in several versions, one per Python, is pinned to the lowest, which all of them can use.
"""

import pathlib
import re
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "# pins: begin (written by .ci/pin.py)\n", "# pins: end\n"


def lock() -> dict[str, list[str]]:
    subprocess.run(["uv", "lock", "--upgrade", "--quiet"], cwd=ROOT, check=True)
    versions: dict[str, list[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        if "version" in package and package["name"] != "nanoeyes":
            versions.setdefault(package["name"], []).append(package["version"])
    return versions


def write(pins: list[str]) -> None:
    path = ROOT / "pyproject.toml"
    block = "".join(f'  "{pin}",\n' for pin in pins)
    head, rest = path.read_text().split(BEGIN)
    path.write_text(f"{head}{BEGIN}constraint-dependencies = [\n{block}]\n{END}{rest.split(END)[1]}")


def key(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


if __name__ == "__main__":
    write([])
    pins: dict[str, str] = {}
    while True:  # pinning a package to one version can bring in another one: until nothing new appears
        found = {name: min(versions, key=key) for name, versions in lock().items()}
        if found == pins:
            break
        pins = found
        write([f"{name}=={version}" for name, version in sorted(pins.items())])
    print(f"{len(pins)} packages pinned")
