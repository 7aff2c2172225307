"""Drafters without trained weights: n-grams, retrieval, lookahead, smaller models and skipped layers."""
