"""What a loss averages over: read off its graph, concluded over a window, and turned into weights.

functions makes one function of the three ways to state a loss. Its result goes through reductions, which reads what one
micro-batch's loss was divided by (with walk, terms and graph), conclusions, which tells means from sums over a whole
window, and weighting, which weights micro-batches by it. coupling finds what no weight can mend.
"""
