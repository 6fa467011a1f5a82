"""The fixtures of the product's recipe tests."""

from recipes.contract import adapter, prompt, store

__all__ = ["adapter", "prompt", "store"]
