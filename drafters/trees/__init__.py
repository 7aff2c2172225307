"""Draft trees from token probabilities: best-first, dynamic (EAGLE-2) and static trees."""
