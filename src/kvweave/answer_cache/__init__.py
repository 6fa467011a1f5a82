"""Answers that were given before: which questions may share one, and when one is no longer valid."""
