"""The fixtures of the recipe tests."""

from support.contract import adapter, prompt, store

__all__ = ["adapter", "prompt", "store"]
