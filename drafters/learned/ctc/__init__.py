"""The CTC drafter: one pass gives frames, collapse turns them into a tree."""
