"""Labelled tasks: finetuning and evaluating on labelled texts, by BERT and GPT.

Needs: bert.
"""
