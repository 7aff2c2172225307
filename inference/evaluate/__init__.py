"""Measures drafters beside each other: ask, append answers, figures, tables, page.

An evaluation goes straight through `run`: `own_loop` or `server` is the source of the answers, which `answers` keeps;
`figures` computes what is reported (with `step_times` and `intervals`); `results` writes and reads a folder; `tables`,
`plots` and `page` show it; `report` and `compare` read folders back.
"""
