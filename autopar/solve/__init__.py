"""Solvers: functions from a `Problem` to a `Solution`. `solvers` has the table of them."""
