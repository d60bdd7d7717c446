"""Trainings that continue on whatever devices there are.

They are planned, resumed and saved automatically.
"""
