"""A plan's own program: a plan and its model come in, its parts and their prices go out."""
