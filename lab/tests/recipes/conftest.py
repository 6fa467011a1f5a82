"""The fixtures of the product's recipe tests."""

from support.contract import adapter, prompt, store

__all__ = ["adapter", "prompt", "store"]
