"""Refusing to start: one line that names what was wrong and what to change."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

EXIT_CODE = 2


class Refusal(Exception):
    """This server cannot do what was asked. The message is one line for the user."""


def exit_refused(error: Refusal) -> NoReturn:
    """Print the refusal and leave at once, before SGLang can swallow it.

    Side effect: ends the process (exit code 2); SGLang's launcher then stops the others.
    """
    print(f"raggedkv: refusing to start: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_CODE)
