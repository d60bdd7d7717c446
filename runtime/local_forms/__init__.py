"""Local forms of operators: what a rank runs where sizes, places or random numbers are its own."""
