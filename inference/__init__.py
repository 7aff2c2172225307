"""What decodes and measures: the verifier around a frozen base."""
