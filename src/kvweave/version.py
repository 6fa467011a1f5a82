"""The version of kvweave."""

__version__ = "0.1.0"
