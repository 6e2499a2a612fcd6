"""Retro: a GPT that attends to retrieved neighbors, their preprocessing and instruction tuning.

Needs: bert, tasks.
"""
