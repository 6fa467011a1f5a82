"""Trains the reference model, the longer model and the auxiliary model; README.md has the commands."""
