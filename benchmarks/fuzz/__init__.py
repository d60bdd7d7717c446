"""Hostile input: seeds of every kind of file, their mutants, and what reading them may do."""
