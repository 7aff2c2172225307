"""Measurements behind the pages in docs/results; run one as ``python -m benchmarks.NAME``, with ``--help`` for options.

Each module feeds a page:

- docs/results/speed.md: `against_transformers` (speed next to transformers' ``generate``), `steps.overhead` (time of
  propose and observe), `steps.by_nodes` (time of a step by the size of the draft tree), `steps.taking_turns` (speed-ups
  of drafters that alternate every few steps), `steps.compiled` (eager and compiled steps side by side)
- docs/results/learned.md: `all_drafters` (training and decoding of all drafters), `learned_drafters` (learned drafters
  by number of nodes and kind of tree)
- docs/results/ctc.md: `learned_drafters`, `ctc.paper_table2` (Table 2 of the CTC paper), `ctc.loss_memory` (memory and
  time of the losses), `ctc.tree_building` (time to build a draft tree), `ctc.draft_vocabulary` (CPU time of a draft
  with a part of a large vocabulary)
- docs/results/serving.md: `serving.vllm_drafters` (drafters in vLLM beside vLLM alone; needs its
  environment), `serving.batched_drafts` (CPU time of the drafts of a batch)
- docs/results/sampled_drafts.md: `sampled_drafts` (chi-squared of sampled texts with drafters that sample)
- docs/results/sampling.md: `sampled_decoding` (sampled decoding with every drafter)
- docs/results/at_scale.md: `at_scale` (a small base and its drafters at the cost of a large base)
- docs/results/long_context.md: `long_context` (drafters on a base whose context is stretched)
- docs/results/training.md: `training_speed` (phases of a training step)
- checkpoints/tiny-chat: `pretrain` (its tokenizer, its training and its folder)

The other modules are shared: `harness` (alternating runs, tables, command lines), `experiment` (training and simulation
of several arms) and `learned_drafter_plots`.
"""
