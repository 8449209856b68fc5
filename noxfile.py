"""Run the tests on each supported Python and PyTorch: `uvx nox`; one pair: `uvx nox --python 3.12 -- --torch 2.11`.

PyTorch comes without CUDA from PyTorch's own index. `-- --torch-backend none` takes it from the index of your machine.
Further arguments go to pytest: `uvx nox --python 3.13 -- tests/library/test_linear.py`.
"""

import argparse

import nox

nox.options.default_venv_backend = "uv"

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# Each PyTorch with the Triton that it was released with. Triton 3.6 cannot interpret kernels with numpy 2.4 and newer.
TORCHES = {
    "2.10": ["triton==3.6.*", "numpy<2.4"],
    "2.11": ["triton==3.6.*", "numpy<2.4"],
    "2.12": ["triton==3.7.*"],
    "2.13": ["triton==3.7.*"],
    "2.14": ["triton==3.8.*"],
    "2.15": ["triton==3.9.*"],
}


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Build the core once for this Python, and run the tests of `make test` with each PyTorch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", choices=TORCHES, action="append")
    parser.add_argument("--torch-backend", default="cpu")
    options, for_pytest = parser.parse_known_args(session.posargs)
    backend = [] if options.torch_backend == "none" else [f"--torch-backend={options.torch_backend}"]
    for torch in options.torch or TORCHES:
        versions = [f"torch=={torch}.*", *(f"{each}; sys_platform == 'linux'" for each in TORCHES[torch])]
        session.install(*versions, *backend)  # first, because `.[dev]` would bring the newest
        session.install(".[dev]", *versions, *backend)
        session.run("python", "-m", "pytest", "-n", "2", "-m", "not full", *for_pytest)
