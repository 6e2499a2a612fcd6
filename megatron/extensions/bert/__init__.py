"""BERT: network, objective, formats, filled masks and embeddings.

Needs: masked_lm.
"""
