"""The command `blocksparse`. Importing torch takes seconds, and Ctrl-C must be quiet then too."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Runs the command line."""
    # One that is ignored, as in the background of a script, stays so.
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if waits:
        signal.signal(signal.SIGINT, _leave)
    try:
        from blocksparse_lab.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"error: the command line needs {error.name}: pip install 'blocksparse-torch[lab]'")

    if waits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except SystemExit as end:
        if end.code and _has_group():
            # PyTorch's threads may still wait for the messages of a process that is gone, and torchrun for this one.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _leave(number: int, frame: object) -> None:
    # At once: an exception would go through half-imported modules, some of which catch any.
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
