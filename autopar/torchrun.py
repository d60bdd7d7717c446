"""`python -m autopar.torchrun`: torchrun, with its arguments, that ends with 0 at SIGTERM where all ranks saved and ended with 0."""

from __future__ import annotations

if __name__ == "__main__":
    from autopar.runtime.launch.agent import main

    main()
