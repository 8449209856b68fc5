"""Build libxsmm from a folder of its sources, and the shim through which the benchmarks call it.

    python benchmarks/libxsmm/build.py ~/libxsmm          some minutes; then
    python benchmarks/reach.py --only libxsmm

The sources (https://github.com/libxsmm/libxsmm, 2.0) are not changed: everything is built in build/libxsmm, or in the
folder of --out; in that case, set BLOCKSPARSE_LIBXSMM to the path of the shim. It needs make and a C compiler.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from targets.libxsmm import BUILT

SHIM = Path(__file__).with_name("shim.c")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds libxsmm and the shim for the benchmarks.")
    parser.add_argument("source", type=Path, help="the folder of libxsmm's sources")
    parser.add_argument("--out", type=Path, default=BUILT.parent)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    source, out = arguments.source.resolve(), arguments.out.resolve()
    if not (source / "include" / "libxsmm.h").exists():
        sys.exit(f"{source}: no include/libxsmm.h; expected the folder of libxsmm's sources")
    out.mkdir(parents=True, exist_ok=True)
    options = ["STATIC=0", "BLAS=0", "FORTRAN=0", f"-j{arguments.jobs}"]
    subprocess.run(["make", "-f", str(source / "Makefile"), *options], cwd=out, check=True)
    compiler = os.environ.get("CC", "cc")
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-Wl,-rpath,$ORIGIN/lib"]
    where = [f"-I{out / 'include'}", f"-L{out / 'lib'}"]
    shim = out / BUILT.name
    subprocess.run([compiler, *flags, *where, str(SHIM), "-o", str(shim), "-lxsmm", "-lm"], check=True)
    print(f"built {shim}")


if __name__ == "__main__":
    main()
