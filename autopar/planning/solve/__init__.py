"""A candidate's tables solved within the memory of its devices and hosts.

In: tables and a limit. Out: a solution, and the bytes that its program needs beyond the tables.
"""
