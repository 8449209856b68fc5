"""Run the tests on each supported Python and PyTorch: `uvx nox`; one pair: `uvx nox --python 3.12 -- --torch 2.11`.

Further arguments go to pytest: `uvx nox --python 3.13 -- tests/library/test_linear.py`.
"""

import argparse

import nox

nox.options.default_venv_backend = "uv"

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TORCHES = ["2.10", "2.11", "2.12", "2.13", "2.14"]


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Build the core once for this Python, and run the tests of `make test` with each PyTorch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", choices=TORCHES, action="append")
    options, for_pytest = parser.parse_known_args(session.posargs)
    for torch in options.torch or TORCHES:
        session.install(f"torch=={torch}.*", "--torch-backend=cpu")  # without CUDA
        session.install(".[dev]", f"torch=={torch}.*", "--torch-backend=cpu")
        session.run("python", "-m", "pytest", "-n", "2", "-m", "not full", *for_pytest)
