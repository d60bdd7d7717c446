"""Calibration: measurements become figures of clusters and devices, with the errors left."""
