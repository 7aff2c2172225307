"""Draft trees from token probabilities: best-first and dynamic (EAGLE-2) trees."""
