"""Whether predicted questions serve the questions that people ask: the natural set's, held out, after a budget of idle work."""
