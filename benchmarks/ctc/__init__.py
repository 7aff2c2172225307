"""What the CTC drafter costs and gains apart from speed; docs/results/ctc.md shows the results.

`learning_curves` shows acceptance by the length of the training, beside the other learned drafters. `paper_table2`
repeats Table 2 of the CTC paper from the trees of `frame_trees`, `loss_memory` measures the losses, `tree_building` the
time to build a draft tree, `draft_vocabulary` what a part of a large vocabulary saves, and `vocabulary_sizes` what it
loses.
"""
