"""The `kvweave` command, also as `python -m kvweave`."""

import sys

from kvweave.errors import MissingExtra
from kvweave.extras import KNOWLEDGE_BASE, require


def main() -> None:
    """Import and run the command line; Ctrl-C during the imports ends as quietly as later."""
    try:
        require("cli", "the command `kvweave`", "typer", "rich", *KNOWLEDGE_BASE)
        from kvweave.cli.app import main as run
    except MissingExtra as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
