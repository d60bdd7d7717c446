"""What the user reads: plans in words and in tables."""
