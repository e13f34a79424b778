"""A command in a process that is told to stop when whoever started it is gone, however it went."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from typing import Final

PARENT: Final = "ZGTRAIN_PARENT"
_PR_SET_PDEATHSIG: Final = 1
_PROGRAMS: Final = {
    "zgtrain": "zgtrain.cli.main:run",
    "zgstore": "zgstore.cli.main:run",
    "torchrun": "torch.distributed.run:main",
}


def main() -> None:
    """``python -m zgtrain.cli.tied PARENT PROGRAM ARGUMENTS…``."""
    parent, program, *arguments = sys.argv[1:]
    tie(int(parent))
    os.environ[PARENT] = str(os.getpid())  # for those that torchrun starts
    # Several processes on the same cores: a thread that has nothing to do must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.argv = [program, *arguments]
    module, _, function = _PROGRAMS[program].partition(":")
    getattr(importlib.import_module(module), function)()


def tie(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent ends; where it cannot, nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked
        sys.exit(130)


if __name__ == "__main__":
    main()
