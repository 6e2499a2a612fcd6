"""T5: an encoder with a decoder behind it, its objective and formats.

Needs: masked_lm.
"""
