"""Schedules of pipelines, one a file; each is found by its name."""
