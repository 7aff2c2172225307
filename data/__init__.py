"""What is said and asked: conversations, tokens, batches, benchmarks. Knows no model."""
