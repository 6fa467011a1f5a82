"""The `kvweave` command, also as `python -m kvweave`."""

import sys

from kvweave.errors import MissingExtra
from kvweave.extras import require, require_knowledge_base


def main() -> None:
    """Import and run the command line; Ctrl-C during the imports ends as quietly as later."""
    try:
        require("cli", "the command `kvweave`", "typer")
        require_knowledge_base("cli", "the command `kvweave`")
        from kvweave.cli.app import main as run
    except MissingExtra as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
