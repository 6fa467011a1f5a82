"""Whether predicted questions serve the natural set's questions, held out, after a budget of idle work."""
