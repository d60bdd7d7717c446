"""Trainings that continue on whatever devices there are: planned, resumed and saved automatically."""
