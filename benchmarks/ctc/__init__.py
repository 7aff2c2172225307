"""What the CTC drafter costs and gains apart from speed; docs/results/ctc.md shows the results.

`paper_table2` repeats Table 2 of the CTC paper from the trees of `frame_trees`, `loss_memory` measures the losses,
`tree_building` the time to build a draft tree, and `draft_vocabulary` what a part of a large vocabulary saves.
"""
