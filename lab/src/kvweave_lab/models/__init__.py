"""The model for long texts: the reference model, trained further on texts of 8K tokens."""

from pathlib import Path

LONGER = Path(__file__).parent / "longer"
