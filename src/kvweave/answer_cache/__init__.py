"""Answers given before: which questions may share one, and when one becomes invalid."""
