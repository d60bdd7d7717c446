"""Experts of a known configuration: their ranks, the ways of their rows, and the host's calls."""
