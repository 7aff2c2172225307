"""Speed of drafters at the sizes people use: a small trained base that computes at the cost of a large one.

`axes` says where the entries of a small weight lie in a large one, `widening` makes the large base and its drafters,
`measurements` reads the decoded answers, and `command` is the benchmark itself.
"""
