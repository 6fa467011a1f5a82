"""The `kvweave` command, also as `python -m kvweave`."""

import sys


def main() -> None:
    """Import and run the command line; Ctrl-C during the imports ends as quietly as later."""
    try:
        from kvweave.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
