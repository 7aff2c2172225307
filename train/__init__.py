"""Training: the LightningModule, the ``lightning`` and ``drafters`` commands, and export.

A training starts in `cli`, which builds `module` with its `callbacks`; `validation` simulates decoding, `checkpoints`
writes and reads checkpoints, `export` turns one into a drafter folder, in our own format or one of `formats`, and
`features` computes hidden states ahead of training.
"""
