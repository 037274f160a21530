"""Ctrl-C before a command is at work: a line, and no traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""The usual exit status of a program that was ended by Ctrl-C."""


def end_quietly_while_importing() -> None:
    """Let Ctrl-C end the process where modules are being imported, and be an exception elsewhere.

    Some modules make another error of the exception, or cannot be imported again after it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    importing, outer = False, frame
    while outer is not None:
        importing |= outer.f_code.co_filename.startswith("<frozen importlib")
        if outer.f_code.co_name == "show_progress":  # it may have to stop what runs elsewhere
            importing = False
            break
        outer = outer.f_back
    if importing:
        sys.stdout.flush()
        os.write(2, b"Interrupted.\n")
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)
