"""`python -m autopar.torchrun`.

It is torchrun, but its exit code is 0 after SIGTERM if all ranks saved and ended with 0.
"""

from __future__ import annotations

if __name__ == "__main__":
    from autopar.runtime.launch.agent import main

    main()
