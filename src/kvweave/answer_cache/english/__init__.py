"""Normalizes English questions: `words` → `dates` → `parse` (into a `clause`) → `terms`, called by `normalize`."""
