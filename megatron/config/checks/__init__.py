"""Checks of what relates several sections of a config; those of one section stand beside it.

A check is a function of a Start that yields a message for each problem: the flag, its value, and what
to write. `config/validation.py` has them all, in the order in which problems are listed.
"""
