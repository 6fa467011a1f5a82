"""Trains the reference model and its auxiliary from scratch; README.md has the commands."""
