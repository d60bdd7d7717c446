"""Plans under other conditions: a plan and a changed request come in, the best plans go out."""
