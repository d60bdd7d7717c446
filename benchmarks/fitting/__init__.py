"""What the programs that fit constants have in common."""
