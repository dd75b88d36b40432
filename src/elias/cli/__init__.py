"""The command line: parse, delegate, print."""

from elias.cli.app import main

__all__ = ["main"]
