"""Measurements beside predictions: profiles and timings come in, clusters and errors go out."""
