"""Generated users with notes and questions, and whole systems that answer them in order of time."""
