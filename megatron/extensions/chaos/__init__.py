"""Fault injection: deaths, hangs and signals of ranks, on purpose."""
