"""The lab for kvweave: it measures, compares, trains and draws; kvweave itself never imports it."""
