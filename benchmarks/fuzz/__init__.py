"""Hostile input: seeds of every kind of file, their mutants, and the limits on reading them."""
