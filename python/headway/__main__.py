"""`python -m headway` is the headway command."""

import os
import pathlib
import sys


def main() -> None:
    """Becomes the program `headway` that the package brings along."""
    program = pathlib.Path(__file__).parent / "bin" / "headway"
    if not program.exists():
        sys.exit("headway: this package was built without the command, which needs CLI11")
    os.execv(program, ["headway", *sys.argv[1:]])


main()
