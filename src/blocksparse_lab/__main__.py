"""The command `blocksparse`. Ctrl-C stays quiet even during the seconds in which torch is imported."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    # Keep an ignored SIGINT ignored, as it is in a script's background.
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if waits:
        signal.signal(signal.SIGINT, _leave)
    try:
        from blocksparse_lab.cli import app
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the command line needs {error.name}: pip install 'blocksparse-torch[lab]', "
            "or in a clone: pip install '.[lab]'"
        )

    if waits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except SystemExit as end:
        if end.code and _has_group():
            # PyTorch's threads may wait for messages of a dead process, and torchrun for this process.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _leave(number: int, frame: object) -> None:
    # Exit at once: an exception would pass through half-imported modules, some of which catch everything.
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
