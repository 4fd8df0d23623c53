"""``python -m bench.peers NAME ...``: an environment for each peer, beside this file, with pinned versions."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from bench.peers import ENVIRONMENTS, PEERS, python, requirements

NAMES = [name for name, peer in PEERS.items() if peer.packages]


def made(name: str) -> None:
    """Make or renew one environment; with uv where it is at hand, else with venv and pip."""
    interpreter = str(python(name))
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    make, install = (
        ([uv, "venv", "--clear", "--python", sys.executable], [uv, "pip", "install", "--python", interpreter])
        if uv
        else ([sys.executable, "-m", "venv", "--clear"], [interpreter, "-m", "pip", "install"])
    )
    subprocess.run([*make, str(ENVIRONMENTS / name)], check=True)
    try:
        subprocess.run([*install, "-r", str(requirements(name))], check=True)
    except BaseException:
        shutil.rmtree(ENVIRONMENTS / name)  # half an environment would look like a whole one
        raise


def main() -> None:
    """Make what is named."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Make environments for peers.")
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    for name in parser.parse_args().names:
        try:
            made(name)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"no environment for {name}: {error}") from None


if __name__ == "__main__":
    main()
