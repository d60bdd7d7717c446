"""The cases whose planning is timed."""
