"""Work while nothing is asked: when, what, how much, and what it was worth."""
