"""The CTC drafter: its loss, the plain mathematics beside it, and its own trees."""
