"""Programs that run the search of a planner of others, in the Python that has what it imports.

Each is started in a checkout of the planner, writes `STEP` and the step that the planner predicts
in seconds, and imports nothing of this project.
"""
