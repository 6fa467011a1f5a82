"""Unmodified Hugging Face models, run over chosen rows of a prompt."""
