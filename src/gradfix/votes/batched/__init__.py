"""The batched engine: the votes of a whole micro-batch for about the price of one backward pass."""
