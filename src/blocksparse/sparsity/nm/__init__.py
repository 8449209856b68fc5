"""N of each M weights, or blocks: masks, layouts, permutations, training, torch's semi-structured weights."""
