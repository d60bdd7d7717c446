"""The search methods by themselves, and the best solution of one that is interrupted."""
