"""The words of other projects over plans.

In come their configurations, notations and calls, out go plans, restrictions of the search, and
their file formats.

Every folder rests on `Plan`, `autopar.api` and the doors of the other rooms.
"""
