"""Planners of others beside ours: their searches, unchanged, each in a process of its own."""
