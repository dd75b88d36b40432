"""Lets ``python -m elias`` and ``torchrun -m elias`` work."""

from elias.cli import main

if __name__ == "__main__":
    main()
