"""Trainings that are disturbed at random, and what became of them."""
