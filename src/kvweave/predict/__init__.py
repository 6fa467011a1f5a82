"""Predicts the questions that users will ask, from a summary of the documents and from earlier questions."""
