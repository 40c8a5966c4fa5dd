"""`headrace`, and `python -m headrace`. The command's own modules are imported where Ctrl-C already ends it quietly."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script; always ends in SystemExit."""
    try:
        from headrace.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
