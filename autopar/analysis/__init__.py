"""Answers about plans as values: a plan, its model and its cluster come in; nothing here prints."""
