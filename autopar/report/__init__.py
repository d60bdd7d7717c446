"""The output for users: values of analysis come in; texts, tables and pages go out."""
