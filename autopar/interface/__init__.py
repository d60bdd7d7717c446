"""Answers of `autopar` in Python, beside `plan` and `parallelize`, as its command line does."""
