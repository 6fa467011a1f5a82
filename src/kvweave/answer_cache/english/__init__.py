"""English questions: what their words, dates, negations and word order say."""
