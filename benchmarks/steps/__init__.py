"""What single decoding steps take; docs/results/speed.md shows the results.

`by_nodes` measures a step by the size of its draft tree, `overhead` the time of propose and observe, `compiled` eager
and compiled steps side by side, and `taking_turns` speed-ups of drafters that alternate every few steps.
"""
