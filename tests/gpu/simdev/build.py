"""Build the simulated accelerator: ``python -m tests.gpu.simdev.build`` prints the folder that goes on PYTHONPATH.

Once for each version of torch and of the sources; it takes Linux, a C++ compiler, Python's headers
and most of a minute. Status 2 where one is missing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = HERE / "simdev.cpp", HERE / "backend.py", Path(__file__)
BUILT = Path(__file__).parents[3] / ".venvs" / "simdev"
OPTIONS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DTORCH_EXTENSION_NAME=_C",
)
# torch finds its plugins by this, and imports them: processes that tests start need nothing but the path.
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: simdev\nVersion: 0\n",
    "entry_points.txt": "[torch.backends]\nsimdev = simdev:autoload\n",
}


def find_folder() -> Path:
    """The folder of this version, which exists if it has been built."""
    digest = hashlib.sha256(torch.__version__.encode() + sys.version.encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return BUILT / f"{torch.__version__}-{digest.hexdigest()[:12]}"


def build(compiler: str) -> Path:
    """Build it unless that has been done; CalledProcessError if the compiler fails."""
    folder = find_folder()
    if folder.exists():
        return folder
    BUILT.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    includes = root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")
    libraries = (f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10", f"-Wl,-rpath,{root / 'lib'}")
    with tempfile.TemporaryDirectory(dir=BUILT) as work:
        made = Path(work) / "made"
        for name, text in METADATA.items():
            path = made / "simdev-0.dist-info" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (made / "simdev").mkdir()
        shutil.copy(HERE / "backend.py", made / "simdev" / "__init__.py")
        paths = (*(f"-I{each}" for each in includes), str(SOURCES[0]), "-o", str(made / "simdev" / "_C.so"))
        subprocess.run([compiler, *OPTIONS, *paths, *libraries], check=True)
        try:
            made.rename(folder)
        except OSError:  # another process was quicker
            if not folder.exists():
                raise
    return folder


def main() -> int:
    """Build it, and print the folder."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    if compiler is None or not has_headers or sys.platform != "linux":
        print("the simulated accelerator needs Linux, a C++ compiler and Python.h", file=sys.stderr)  # noqa: T201
        return 2
    print(build(compiler))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
