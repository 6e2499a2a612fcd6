"""Hybrid networks: layers of Mamba-2, Gated DeltaNet, attention, MLPs and experts by a pattern."""
