"""Crashes, power cuts, full disks and damage on small homes, checked against a model of what must be true: `kvweave-faults`."""
