"""Clusters: levels, links and devices from presets and files, with every constant's source."""
