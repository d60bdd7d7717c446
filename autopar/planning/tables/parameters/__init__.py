"""The parameters in the tables: their storage, gathers, reductions and messages.

In: tables and their multiplicities. Out: seconds of the parameters' collectives, and the share of
them that runs under computation.
"""
