"""Trainings disturbed at random, and their results."""
