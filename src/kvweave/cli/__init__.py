"""The command line: one thin file per command group.

Heavy parts (PyTorch, transformers, LanceDB) are imported inside commands, so that `--help` is quick and `ls` is
not slowed down by what it does not need.
"""
