"""The command line, as `autopar` and as `python -m autopar`.

Ctrl-C ends it with one line, even while it is loading.
"""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # what is left is the interpreter's own end


if __name__ == "__main__":
    main()
