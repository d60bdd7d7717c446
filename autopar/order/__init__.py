"""The order of a step: what each rank does, action after action, as data without prices."""
