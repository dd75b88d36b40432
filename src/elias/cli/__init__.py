"""The command line: parse options, call the library and print the results."""

from elias.cli.app import main

__all__ = ["main"]
