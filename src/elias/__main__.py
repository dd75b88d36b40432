"""Entry point of ``python -m elias`` and ``torchrun -m elias``."""

from elias.cli import main

if __name__ == "__main__":
    main()
