"""Run a program that ends with its parent, even if the parent is killed: `python ends_with_parent.py PARENT-PID COMMAND ...`.

It is started by its path and imports nothing of FedMe, so that it costs some milliseconds. On systems other than Linux it only
runs the program.
"""

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>; it stays set when this process becomes the program


def main() -> None:
    """Become the program."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != int(parent):  # it ended before the line above
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
