"""How well matchers distinguish paraphrases of a question from questions that only look similar."""
