"""Check that this machine can run `make demo`, before anything is downloaded; print what to do if it cannot.

Any Python 3 runs it, since the first thing it checks is the version.
"""

import os
import shutil
import sys

MIN_PYTHON = (3, 11, 4)
MIN_FREE_GB = 4  # PyTorch for CPUs, the packages and the compiled core; PyTorch for CUDA takes 6 more


def problems(root):
    """Return what stops the set-up, each with what to do."""
    found = []
    if sys.version_info < MIN_PYTHON:
        wanted, version = (".".join(map(str, numbers[:3])) for numbers in (MIN_PYTHON, sys.version_info))
        found.append(
            f"Python {wanted} or newer is needed; {sys.executable} is {version}. "
            "Name another: make demo PYTHON=python3.12"
        )
    if not any(map(shutil.which, [os.environ.get("CXX", "c++"), "g++", "clang++"])):
        found.append(
            "A C++17 compiler is needed, and neither c++, g++ nor clang++ is on the PATH. Install one: "
            "apt-get install g++, dnf install gcc-c++, or xcode-select --install"
        )
    if not os.access(root, os.W_OK):
        found.append(
            f"{root} cannot be written, but .venv and build go there. Use a clone of your own: "
            "git clone FOLDER ~/blocksparse"
        )
    free = shutil.disk_usage(root).free / 1e9
    if free < MIN_FREE_GB and not os.path.exists(os.path.join(root, ".venv", "demo")):
        found.append(
            f"{MIN_FREE_GB} GB of free disk space are needed, and {root} has {free:.1f} GB. Free some, or "
            "clone onto another disk"
        )
    return found


if __name__ == "__main__":
    found = problems(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if found:
        sys.exit("\n".join(found))
