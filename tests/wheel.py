"""Build, install and try the source distribution and the wheel, as a user gets them: `make wheel-test`.

The source distribution holds what git does; the wheel is built from it alone, needs no newer libraries than its tag
says, is installed beside PyTorch within 20 seconds and works without a compiler. `--smoke` is that last part, in
the Python that runs it.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# manylinux_2_28: what the oldest of its systems (AlmaLinux 8) has.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
INSTALL_SECONDS = 20
WHEEL_BYTES = 3 << 20


def run(*command: object, **options: object) -> str:
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def sdist(folder: Path) -> Path:
    """Builds the source distribution, and compares it with what git knows; returns its unpacked folder."""
    program = f"import scikit_build_core.build as b; print(b.build_sdist({str(folder)!r}))"
    name = run(sys.executable, "-c", program, cwd=ROOT).split()[-1]
    with tarfile.open(folder / name) as packed:
        packed.extractall(folder, filter="data")
    source = folder / name.removesuffix(".tar.gz")
    here = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    known = set(run("git", "ls-files", cwd=ROOT).splitlines())
    assert here - {"PKG-INFO"} == known, (sorted(known - here), sorted(here - known))
    return source


def wheel(source: Path, folder: Path) -> Path:
    """Builds the wheel in `source`; prints the symbols of its core that are newer than manylinux_2_28."""
    # Where the folder has another name each time, ccache finds what it has by relative paths.
    environment = os.environ | {"CCACHE_BASEDIR": str(source)}
    begin = time.perf_counter()
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    run(sys.executable, "-m", *build, "--config-settings=cmake.define.BLOCKSPARSE_SETS=all", env=environment)
    (built,) = folder.glob("*.whl")
    size = built.stat().st_size
    print(f"{built.name}: {size / 1e6:.1f} MB, built in {time.perf_counter() - begin:.0f} s")
    assert size < WHEEL_BYTES, size
    return built


def newer_symbols(core: Path) -> list[str]:
    """Versioned symbols that manylinux_2_28 lacks: none where the wheel is built in its image."""
    symbols = set()
    for line in run("objdump", "-T", core).splitlines():
        found = re.search(r"\(?(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\)?\s+(\S+)$", line)
        if found and tuple(map(int, found[2].split("."))) > NEWEST[found[1]]:
            symbols.add(f"{found[3]} ({found[1]}_{found[2]})")
    return sorted(symbols)


def install(built: Path, folder: Path, torch: str) -> None:
    """Installs the wheel into a fresh environment with PyTorch, and uses it with nothing in PATH."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", torch)
    begin = time.perf_counter()
    run(python, "-m", "pip", "install", "--quiet", built)
    seconds = time.perf_counter() - begin
    print(f"pip install beside PyTorch: {seconds:.1f} s")
    (core,) = folder.glob("lib/python*/site-packages/blocksparse/_core*.so")
    print("newer than manylinux_2_28:", ", ".join(newer_symbols(core)) or "nothing")
    print(run(python, Path(__file__).resolve(), "--smoke", cwd=folder, env={"PATH": ""}))
    assert seconds < INSTALL_SECONDS, seconds


def smoke() -> None:
    """Multiplies, trains a step, and makes a model sparse, all on the compiled core."""
    import torch

    import blocksparse as bs

    with bs.use_backend("cpu"):  # raises where the core does not load
        layer = bs.nn.Linear(64, 96, density=0.5, block_size=16)
        x = torch.randn(8, 64)
        torch.testing.assert_close(layer(x), x @ bs.to_dense(layer.values, layer.layout).T + layer.bias)
        optimizer = torch.optim.SGD(layer.parameters())
        layer(x).square().mean().backward()
        optimizer.step()
        bs.nn.Conv2d(32, 32, 3, density=0.5, block_size=16)(torch.randn(1, 32, 8, 8))
    sparse = bs.sparsify(torch.nn.Sequential(torch.nn.Linear(256, 256)), density=0.25, force=True)
    assert isinstance(sparse[0], bs.nn.Linear)
    assert "the model" in str(bs.report(sparse))
    print(f"blocksparse {bs.__version__} with torch {torch.__version__} in {Path(bs.__file__).parent}: works")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="use the blocksparse of this Python, build nothing")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs first (%(default)s)")
    options = parser.parse_args()
    if options.smoke:
        return smoke()
    with tempfile.TemporaryDirectory() as folder:
        built = wheel(sdist(Path(folder)), Path(folder))
        install(built, Path(folder) / "environment", options.torch)


if __name__ == "__main__":
    main()
