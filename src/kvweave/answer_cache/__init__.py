"""Answers given before: which question is the same one again, what an answer rests on, and when it no longer counts."""
