"""The output for users: plans in words, tables and pages."""
