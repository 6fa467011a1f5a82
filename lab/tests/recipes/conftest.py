"""The fixtures of the product's recipe tests."""

from recipes.conftest import adapter, prompt, store

__all__ = ["adapter", "prompt", "store"]
