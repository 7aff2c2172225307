"""Measurements behind the pages in docs/results; run one as ``python -m benchmarks.NAME``, with ``--help`` for options.

The environment variable OMP_NUM_THREADS sets the number of threads. Each module feeds a page:

- docs/results/ctc.md, ctc_variants.md: `learned_drafters` (learned drafters by nodes, kind of draft tree
  and length of the training, and Table 2 of the CTC paper; ``--arms '[fair]'`` gives every method four optimizers)
- docs/papers.md: `paper_figures` (figures of the training-free papers that `drafters eval` does not make) and `recount`
  (published answers by every counting convention, those of the CTC paper among them)
- docs/results/replay.md: `replay` (drafters that read only tokens, on recorded answers)
- docs/results/speed.md: `steps` (time of a step by the size of the draft tree, eager and graphed) and
  `against_transformers` (our drafters beside transformers' own `generate`)
- docs/results/engines.md: `engines` (servers of several engines on one machine, those of engines.txt).
- docs/results/int8.md: `quantised` (quality and steps of a base in 8 bits)
- docs/results/at_scale.md: `at_scale` (a small base and its drafters at the cost of a large base, by `widening`)
- docs/results/training.md: `training_speed` (a training step by phase) and `training_launches` (what a step of the
  recipes for large bases launches)
- docs/results/qwen.md: `task_quality` (scores of a base alone on whole benchmarks, many questions at once)
- docs/fine_tune.md: `fine_tuned_drafter` (a base's drafter, trained further on the answers of a fine-tune)
- `make gpu`: `gpu` (a page in ten minutes, with limits for its parts) and `gpu_parts` (what it measures)
- docs/design.md: `launches` (operators, copies and waits of a decoding step)
- checkpoints/tiny-chat: `pretrain` (its tokenizer, its training and its folder)

The other modules are shared: `harness` (alternating runs, tables, command lines), `experiment` (training and simulation
of several arms) and `paper_table2` (that table, decoded live). Scripts behind older tables are at commit dda4815.
"""
