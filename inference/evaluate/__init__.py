"""Measures drafters beside each other: answers, then metrics, then tables, plots and one page.

An evaluation goes straight through this folder: `command` makes a `plan`; `worker` decodes the `answers`, or `server`
asks a server for them; `metrics` computes the figures (with `breakdowns`, `step_times` and `intervals`); `results`
keeps them in a folder; `tables`, `plots` and `page` show them. `report` reads folders back, and `compare` two of them.
"""
