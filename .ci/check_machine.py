"""Check that this machine can run `make demo`, before anything is downloaded; print what to do if it cannot.

It checks the version of Python first. Python 2.7 parses this file, so it has no f-strings.
"""
# ruff: noqa: UP032

import glob
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
        return [
            "Python {} or newer is needed; {} is {}. Name another: make demo PYTHON=python3.12".format(
                wanted, sys.executable, version
            )
        ]
    compiler = os.environ.get("CXX", "").split()[:1]
    if compiler and not shutil.which(compiler[0]):
        found.append("CXX names the compiler {}, which is not there. Name another: export CXX=g++".format(*compiler))
    elif not any(map(shutil.which, compiler or ["c++", "g++", "clang++"])):
        found.append(
            "A C++17 compiler is needed, and neither c++, g++ nor clang++ is on the PATH. Install one: "
            "apt-get install g++, dnf install gcc-c++, or xcode-select --install"
        )
    if not os.access(root, os.W_OK):
        found.append(
            "{} cannot be written, but .venv and build go there. Use a clone of your own: "
            "git clone FOLDER ~/blocksparse".format(root)
        )
    free = shutil.disk_usage(root).free / 1e9
    torch = glob.glob(os.path.join(root, ".venv", "lib", "python*", "site-packages", "torch"))
    if free < MIN_FREE_GB and not torch:  # with PyTorch there, most of the space is already used
        found.append(
            "{} GB of free disk space are needed, and {} has {:.1f} GB. Free some, or clone onto another disk".format(
                MIN_FREE_GB, root, free
            )
        )
    return found


if __name__ == "__main__":
    found = problems(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if found:
        sys.exit("\n".join(found))
