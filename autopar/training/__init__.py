"""Trainings that go on where they were, on the devices that are there: planned, resumed and saved by themselves."""
