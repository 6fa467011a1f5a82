"""What every recipe's answers are worth: tasks, metrics, the runner, and its reports."""
