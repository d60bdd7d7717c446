"""Elimination of variables: orders, joins of tables, pruning before, and min-marginals after."""
