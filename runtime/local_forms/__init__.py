"""Local forms by family: operators on shards whose sizes, places or neighbours matter."""
