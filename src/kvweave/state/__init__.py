"""What a knowledge base holds: its tables, models, settings in force and locks."""
