"""Seconds of a step: prices over layouts, pipelines, and the order of actions played on streams."""
