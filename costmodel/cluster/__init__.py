"""Clusters: levels, links and devices, from presets and files, with the source of every constant."""
