"""Local forms by family: how a rank runs an operator of which it holds a shard, where its sizes, its place or its neighbours matter."""
