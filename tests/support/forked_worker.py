"""Stands in for Python when pytest-xdist starts a process that runs tests: forks it from the server at the given address."""

import sys
from pathlib import Path

if __name__ == "__main__":  # the forked process imports this file too
    sys.path[0] = str(Path(__file__).parents[1])
    from support.processes import Program, use_server

    _, address, _, *words = sys.argv  # the words after `python -u`
    use_server(address)
    with Program(words, stdin=sys.stdin.buffer, stdout=sys.stdout.buffer, stderr=sys.stderr.buffer) as worker:
        sys.exit(worker.wait())
