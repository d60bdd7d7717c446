"""Scoring the cost model on published measurements."""
