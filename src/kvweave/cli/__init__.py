"""The command line: one thin file per command group.

Heavy parts (PyTorch, transformers, LanceDB) are imported inside commands, so that `--help` and `ls` are quick.
"""

from kvweave.cli.app import main as main
