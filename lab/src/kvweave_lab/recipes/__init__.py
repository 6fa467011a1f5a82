"""Recipes to compare with, which no user should choose; kvweave finds them through the group kvweave.recipes."""
