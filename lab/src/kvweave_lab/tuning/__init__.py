"""Fitting small parts to the model that answers, on the user's own documents."""
