"""What a loss averages over: read off its graph, concluded over a window, and turned into weights."""
